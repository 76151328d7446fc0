"""A model of Transformers that computes over a NibbleCache when it is given one, and is itself when it is not.

For the time of such a call the model's attention is Nibble's, and layers that expand a latent or choose tokens are lent
what the engine would have replaced in them (models/adapt.py). Nothing of that stays: weights, names and other callers
see the model as it is. Owns attach() and Served. Must not know what a cache does with a call.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from nibble.errors import ConfigError
from nibble.models import hook
from nibble.models.hook import adaptations

CACHE = "past_key_values"
_IMPLEMENTATION = "_attn_implementation_internal"


class Runs(Protocol):
    """A cache that computes a call of its model."""

    model: Any

    def run(self, **given: Any) -> Any:
        """Answers as the model's forward() would."""
        ...


class Served:
    """The forward() of a model that knows NibbleCaches. kind: their class."""

    _lock: threading.RLock
    _adaptations: list[tuple[Any, dict[str, Any]]] | None

    def __init__(self, model: Any, kind: type[Runs]) -> None:
        self.model, self.kind, self.plain = model, kind, model.forward
        functools.update_wrapper(self, self.plain)  # its signature, which generate() reads
        self.__setstate__({})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(self.plain).bind_partial(*args).arguments | kwargs if args else kwargs
        cache = given.get(CACHE)
        if not isinstance(cache, self.kind):
            return self.plain(*args, **kwargs)
        if cache.model is not self.model:
            raise ConfigError(
                f"this NibbleCache was made for another {type(cache.model).__name__}; make one for each"
            )
        if torch.compiler.is_compiling():
            raise ConfigError("a NibbleCache cannot be used in a compiled model; call the model itself")
        with self.lent(), torch.no_grad():
            return cache.run(**{name: value for name, value in given.items() if name != CACHE})

    @contextmanager
    def lent(self) -> Iterator[None]:
        """With Nibble's attention. One call at a time: others of the model would meet it half changed."""
        with self._lock:
            if self._adaptations is None:
                self._adaptations = adaptations(self.model)
            loans, configs = self._adaptations, _configs(self.model)
            before = [getattr(config, _IMPLEMENTATION) for config in configs]
            try:
                for config in configs:
                    setattr(config, _IMPLEMENTATION, hook.NAME)
                for module, attributes in loans:  # found before parameters and modules, and none of them
                    module.__dict__.update(attributes)
                yield
            finally:
                for module, attributes in loans:
                    for name in attributes:
                        module.__dict__.pop(name, None)
                for config, name in zip(configs, before, strict=True):
                    setattr(config, _IMPLEMENTATION, name)

    def __getstate__(self) -> dict[str, Any]:
        """Without what belongs to this very model: a copy of the model makes its own."""
        return {name: x for name, x in self.__dict__.items() if name not in {"_lock", "_adaptations"}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.RLock()
        self.refresh()

    def refresh(self) -> None:
        """Looks at the model anew in the next call: its weights may be others."""
        self._adaptations = None


def attach(model: Any, kind: type[Runs]) -> Served:
    """Lets `model` know caches of `kind`; once is enough. Raises ConfigError for a compiled model."""
    if getattr(model, "_compiled_call_impl", None) or hasattr(model.forward, "_torchdynamo_orig_callable"):
        raise ConfigError("the model is compiled; make the NibbleCache for it without torch.compile")
    if isinstance(model.forward, Served):
        model.forward.refresh()
        return model.forward
    model.forward = served = Served(model, kind)
    return served


def _configs(model: Any) -> list[Any]:
    """The configs in which the model's modules look up their attention."""
    found = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    return [config for config in found.values() if hasattr(config, _IMPLEMENTATION)]
