"""What Triton's interpreter does anew for every call of a device function, done once for a launch."""

from __future__ import annotations

from typing import Any

import triton.language as tl
from triton.runtime import interpreter


class Scope:
    """Of what a launch has patched: restored at its end. What is called within it is part of it."""

    def __init__(self, inner: Any, active: list[frozenset[str]]) -> None:
        self._inner, self._active = inner, active

    def restore(self) -> None:
        self._active.pop()
        self._inner.restore()


def install() -> None:
    """Let the interpreter of this process patch the language once a launch, and look each type up once."""
    patch, active = interpreter._patch_lang, list[frozenset[str]]()

    def patch_once(fn: Any) -> Any:
        names = frozenset(one.__name__ for one in fn.__globals__.values() if one is tl or one is tl.core)
        if active:
            # A call of a device function, which restores nothing.
            return None if names <= active[-1] else patch(fn)
        scope = Scope(patch(fn), active)
        active.append(names)
        return scope

    look_up, known = interpreter._get_np_dtype, dict[str, Any]()

    def np_dtype(type_: Any) -> Any:
        scalar = type_.element_ty if isinstance(type_, tl.block_type) else type_
        if type(scalar) is not tl.dtype:
            return look_up(type_)
        if scalar.name not in known:
            known[scalar.name] = look_up(scalar)
        return known[scalar.name]

    interpreter._patch_lang, interpreter._get_np_dtype = patch_once, np_dtype
