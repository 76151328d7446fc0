"""A model of Transformers that computes over a NibbleCache when it gets one, and is itself when it does not.

For the time of such a call the model's attention is Nibble's, and layers that expand a latent or select tokens get what
the engine would have replaced in them (models/hook.py). Nothing of that stays: weights, names and other callers see the
model as it is.
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


class RunsModel(Protocol):
    """A cache that computes a call of its model."""

    model: Any

    def run(self, **arguments: Any) -> Any:
        """Return what the model's forward() would."""
        ...


class PatchedForward:
    """The forward() of a model that also takes NibbleCaches.

    Args:
        model: whose forward() is replaced.
        kind: the class of its caches.
    """

    _lock: threading.RLock
    _adaptations: list[tuple[Any, dict[str, Any]]] | None

    def __init__(self, model: Any, kind: type[RunsModel]) -> None:
        self.model, self.kind, self.plain = model, kind, model.forward
        # generate() reads the signature.
        functools.update_wrapper(self, self.plain)
        self.__setstate__({})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model for one call of generate()."""
        arguments = kwargs
        if args:
            arguments = inspect.signature(self.plain).bind_partial(*args).arguments | kwargs
        cache = arguments.get(CACHE)
        if not isinstance(cache, self.kind):
            return self.plain(*args, **kwargs)
        if cache.model is not self.model:
            raise ConfigError(
                f"this NibbleCache was made for another {type(cache.model).__name__}; make one for each"
            )
        if torch.compiler.is_compiling():
            raise ConfigError("a NibbleCache cannot be used in a compiled model; call the model itself")
        with self.patched(), torch.no_grad():
            return cache.run(**{name: value for name, value in arguments.items() if name != CACHE})

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Give the model Nibble's attention while the caller runs it."""
        # One call at a time: another one would meet a half changed model.
        with self._lock:
            if self._adaptations is None:
                self._adaptations = adaptations(self.model)
            patches, configs = self._adaptations, _configs(self.model)
            before = [getattr(config, _IMPLEMENTATION) for config in configs]
            try:
                for config in configs:
                    setattr(config, _IMPLEMENTATION, hook.NAME)
                # Attributes are looked up before parameters and modules, and are none of them.
                for module, attributes in patches:
                    module.__dict__.update(attributes)
                yield
            finally:
                for module, attributes in patches:
                    for name in attributes:
                        module.__dict__.pop(name, None)
                for config, name in zip(configs, before, strict=True):
                    setattr(config, _IMPLEMENTATION, name)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to this very model: a copy of the model makes its own."""
        return {name: x for name, x in self.__dict__.items() if name not in {"_lock", "_adaptations"}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.RLock()
        self.refresh()

    def refresh(self) -> None:
        """Adapt the model anew in the next call: its weights may have changed."""
        self._adaptations = None


def attach(model: Any, kind: type[RunsModel]) -> PatchedForward:
    """Let `model` take caches of `kind`; once is enough. Raise ConfigError for a compiled model."""
    if getattr(model, "_compiled_call_impl", None) or hasattr(model.forward, "_torchdynamo_orig_callable"):
        raise ConfigError("the model is compiled; make the NibbleCache for it without torch.compile")
    if isinstance(model.forward, PatchedForward):
        model.forward.refresh()
        return model.forward
    model.forward = patched = PatchedForward(model, kind)
    return patched


def _configs(model: Any) -> list[Any]:
    """Return the configs in which the model's modules look up their attention."""
    configs = {
        id(config): config for module in model.modules() if (config := getattr(module, "config", None))
    }
    return [config for config in configs.values() if hasattr(config, _IMPLEMENTATION)]
