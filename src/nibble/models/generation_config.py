"""Sampling defaults of a model, from its generation_config.json. No torch or Transformers: the server asks early.

The rule is the same for the command line, the server and Python: what a request names wins, then what the model's file
names, then the defaults of SamplingParams. The fields are those that vLLM and SGLang take. `do_sample` is none of them:
a file that only says `do_sample: false` leaves the temperature open. Nor is `max_new_tokens`, which is no taste of the
model but a length.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nibble.config import SamplingParams, sampling
from nibble.errors import ConfigError, RequestError, WeightError
from nibble.models.hub import model_file, read_json

AUTO, NONE = "auto", "none"
FILE = "generation_config.json"
FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What requests get that leave it out."""

    values: Mapping[str, int | float] = field(default_factory=dict)
    """By name of a field of SamplingParams; what is not here has that class's default."""
    source: str = ""
    """The file, for people."""

    def params(self, **options: Any) -> SamplingParams:
        """Return SamplingParams of `options`, and of the defaults for what they leave out. Raise RequestError."""
        return sampling(**{**self.values, **options})

    @property
    def summary(self) -> str:
        """Return a line for people, empty where the model has no defaults."""
        if not self.values:
            return ""
        values = ", ".join(f"{name} {value:g}" for name, value in self.values.items())
        return f"sampling defaults of the model: {values} ({self.source}); --generation-config none for none"


def sampling_defaults(model: str, generation_config: str = AUTO) -> SamplingDefaults:
    """Return the sampling defaults of a model.

    Args:
        model: local folder, hub name, or a bundled model.
        generation_config: `auto` for the model's own file, `none`, or a folder that holds another one.

    Raises:
        ConfigError: the folder has no such file.
        WeightError: a value cannot be used, or the file cannot be read.
    """
    if generation_config == NONE:
        return SamplingDefaults()
    path = model_file(model, FILE) if generation_config == AUTO else _file_in(generation_config)
    if path is None:
        return SamplingDefaults()
    entries = read_json(path)
    values = {name: entries[name] for name in FIELDS if entries.get(name) is not None}
    # Some say -1 for all tokens, as vLLM does.
    if values.get("top_k") == -1:
        values["top_k"] = 0
    try:
        params = sampling(**values)
    except RequestError as error:
        raise WeightError(
            f"{path} cannot give sampling defaults: {error}; correct the file, or do without it: "
            "--generation-config none"
        ) from error
    # As SamplingParams stores them: a temperature of almost 0 is 0.
    source = FILE if generation_config == AUTO else str(path)
    return SamplingDefaults({name: getattr(params, name) for name in values}, source)


def _file_in(folder: str) -> Path:
    path = Path(folder).expanduser() / FILE
    if not path.is_file():
        raise ConfigError(
            f"generation_config must be auto, none, or a folder with a {FILE}, and there is no {path}"
        )
    return path
