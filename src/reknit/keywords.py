"""Errors of calls with a wrong keyword or argument, with the right place, the nearest name, or the type."""

from __future__ import annotations

import re
from collections.abc import Callable as AnyCallable
from collections.abc import Iterable as AnyIterable
from collections.abc import Mapping as AnyMapping
from functools import wraps
from inspect import Parameter, signature
from os import PathLike
from types import FunctionType, NoneType
from typing import TYPE_CHECKING, Any, SupportsFloat, SupportsIndex, TypeVar

from reknit.errors import KeywordError, ReknitError, UsageError, nearest, shown, without_secrets

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    Place = tuple[tuple[str, str], ...]
    """A parameter and the checked class for it, then a parameter of that class, and so on."""

_Target = TypeVar("_Target", bound="Callable[..., Any]")

_known: dict[str, Callable[..., Any]] = {}
"""Every checked call by its public name: functions, classes and their methods."""

_classes: dict[str, str] = {}
"""Names in `_known` of the classes, by the names that annotations have."""

_FIRST = ("save", "load", "SaveOptions", "LoadOptions", "CommOptions", "Checkpointer")
"""Names in `reknit` whose keywords are searched for an unknown keyword of another call."""

_NAMESPACES = {
    "reknit.policies": "reknit.policies",
    "reknit.integrations.model_maps": "reknit.transforms.models",
    "reknit.transforms": "reknit.transforms",
    "reknit.sinks": "reknit.sinks",
    "reknit.monitor": "reknit.sinks",
}
"""The public modules of packages; the names of all other packages are in `reknit` itself."""

_CALLS = {
    "reknit.save": 'call reknit.save(path, {"model": model})',
    "reknit.load": 'call reknit.load(path, {"model": model}), which fills these objects; '
    "reknit.open(path) reads a checkpoint without them",
}
"""The right calls where an argument is missing, unlike in `torch.load`, which needs no state."""

_TYPES: dict[str, Any] = {
    "str": str,
    "bytes": bytes,
    "bool": (bool, SupportsFloat),
    "int": SupportsIndex,
    "float": (SupportsFloat, SupportsIndex),
    "None": NoneType,
    "PathLike": PathLike,
    "Path": PathLike,
    "Callable": AnyCallable,
    "Mapping": AnyMapping,
    **dict.fromkeys(("Sequence", "Iterable", "Collection", "list", "tuple", "set"), AnyIterable),
}
"""The types of arguments, by the names that annotations have without their brackets.

The types of numbers are wide, so that tensors of one element pass.  An error inside a call, such as one of
the user's code, must not be reported as an error of its arguments.
"""

_BRACKETS = r"\[[^\[\]]*\]"
_A_CLASS = r"(\w+)( \| None)?"


def is_text(value: object) -> bool:
    """Return whether a value is a text, and not an empty one."""
    return isinstance(value, str) and value != ""


def checked_call(target: _Target) -> _Target:
    """Make a function, or a class with its public methods, suggest keywords in place of unknown ones.

    A call with an unknown keyword raises `KeywordError`; a correct call costs a frame.  The text of an object
    is without the secrets of its URLs.
    """
    module = f"{target.__module__}."
    name = f"reknit.{target.__name__}"
    for package, public in _NAMESPACES.items():
        if module.startswith(f"{package}."):
            name = f"{public}.{target.__name__}"
    _known[name] = target
    if not isinstance(target, type):
        return _checked(target, name)  # type: ignore[no-any-return]
    _classes[target.__name__] = name
    for member, method in list(vars(target).items()):
        if isinstance(method, FunctionType) and (member == "__init__" or not member.startswith("_")):
            called = name if member == "__init__" else f"{name}.{member}"
            _known.setdefault(called, method)
            setattr(target, member, _checked(method, called))
    if hasattr(target, "__dataclass_fields__"):
        shows: Callable[[Any], str] = target.__dict__["__repr__"]
        target.__repr__ = _without_secrets(shows)  # type: ignore[method-assign, assignment]
    return target


def _without_secrets(shows: Callable[[Any], str]) -> Callable[[Any], str]:
    @wraps(shows)
    def call(self: Any) -> str:
        return without_secrets(shows(self))

    return call


def _checked(function: Any, name: str) -> Any:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (TypeError, AttributeError) as error:
            if isinstance(error, ReknitError):
                raise
            if (wrong := _wrong(function, name, args, kwargs)) is not None:
                raise wrong from None
            if (mistyped := _mistyped(function, name, args, kwargs)) is not None:
                raise mistyped from error
            raise

    return call


def _wrong(
    function: Callable[..., Any], name: str, args: tuple[Any, ...], given: Mapping[str, Any]
) -> KeywordError | None:
    """Return the error of unknown, missing or positional keywords of a call, else None.

    A `TypeError` may have another cause, or come from inside the call.
    """
    parameters = _parameters(function)
    kinds = [parameter.kind for parameter in parameters.values()]
    wrong = {keyword: value for keyword, value in given.items() if keyword not in parameters}
    if wrong and Parameter.VAR_KEYWORD not in kinds:
        listed, is_option = ", ".join(map(repr, wrong)), _called(name) == "option"
        return KeywordError(
            f"{name} has no option {listed}" if is_option else f"{name} has no keyword {listed}",
            remedy=_joined(_remedies(name, parameters, wrong, given)),
        )
    needed = [each for each, parameter in parameters.items() if _is_needed(parameter)]
    if missing := [each for each in needed[len(args) :] if each not in given]:
        call = f"{name}({', '.join(each for each in needed if each != 'self')})"
        remedy = _CALLS.get(name, f"call {call}")
        return KeywordError(f"{name} needs {' and '.join(missing)} as well", remedy=remedy)
    most, own = kinds.count(Parameter.POSITIONAL_OR_KEYWORD), "self" in parameters
    if Parameter.VAR_POSITIONAL in kinds or len(args) <= most:
        return None
    by_name = [keyword for keyword, each in parameters.items() if each.kind is each.KEYWORD_ONLY]
    return KeywordError(
        f"{name} takes {most - own or 'no'} arguments without their names, not {len(args) - own}",
        remedy=f"pass by their names {', '.join(by_name)}" if by_name else "leave the last ones out",
    )


def unpacked(options: Mapping[str, Any], kind: type) -> str:
    """Return the remedy for a mapping of options: an object of the kind, and keywords beside it."""
    fields = _parameters(kind)
    inside = {name: value for name, value in options.items() if name in fields}
    rest = {name: value for name, value in options.items() if name not in fields}
    said = list(_remedies(f"reknit.{kind.__name__}", fields, rest, ()))
    if inside or not rest:
        said.insert(0, f"pass options=reknit.{kind.__name__}({_spelled(inside)})")
    return _joined(said)


def _joined(remedies: Iterable[str]) -> str:
    return "; ".join(remedies).replace("?;", "? ")


def _mistyped(
    function: Callable[..., Any], name: str, args: tuple[Any, ...], given: Mapping[str, Any]
) -> UsageError | None:
    """Return the error of the first argument whose type differs from its annotation, or None.

    Protocols and other annotations that are not in `_TYPES` are ignored.
    """
    parameters = _parameters(function)
    for parameter, value in {**dict(zip(parameters, args, strict=False)), **given}.items():
        annotation = str(parameters[parameter].annotation) if parameter in parameters else "Any"
        plain = annotation
        while plain != (plain := re.sub(_BRACKETS, "", plain)):
            pass
        kinds = [_TYPES.get(kind.rpartition(".")[2]) or _class(kind) for kind in plain.split(" | ")]
        if None not in kinds and not isinstance(value, tuple(kind for kind in kinds if kind is not None)):
            return UsageError(f"{parameter} of {name} is a {annotation}, not {shown(value)}")
    return None


def _class(name: str) -> type | None:
    """Return a checked class by its name in annotations, None for anything else."""
    kind = _known.get(_classes.get(name, ""))
    return kind if isinstance(kind, type) else None


def _remedies(
    name: str, own: Mapping[str, Parameter], wrong: Mapping[str, Any], given: Iterable[str]
) -> Iterator[str]:
    """Yield a remedy for each wrong keyword of a call, and one for all keywords of the same options."""
    places = _places(own)
    in_options = [each for each, place in places.items() if _called(place[-1][1]) == "option"]
    inside: dict[Place, dict[str, Any]] = {}
    for keyword, value in wrong.items():
        if keyword in places:
            inside.setdefault(places[keyword], {})[keyword] = value
        elif (taker := _taker(name, keyword)) is not None:
            beside = " itself" if _takes(taker, name) else ""
            what = "an option" if _called(taker) == "option" else "a keyword"
            yield f"{keyword} is {what} of {taker}{beside}: {keyword}={shown(value)}"
        elif near := nearest(keyword, [*own, *in_options]):
            paste = f"  pass {_made(places[near[0]], {near[0]: value}, given)}" if near[0] in places else ""
            yield f"did you mean {near[0]!r}?{paste}"
        else:
            yield f"{name} takes {', '.join(each for each in own if each != 'self')}"
    for place, options in inside.items():
        yield f"pass {_made(place, options, given)}"


def _made(place: Place, options: Mapping[str, Any], given: Iterable[str]) -> str:
    """Return the code that passes options in a call with some given keywords."""
    (parameter, kind), *deeper = place
    inside = _made(tuple(deeper), options, ()) if deeper else _spelled(options)
    return f"{parameter}={kind}({'..., ' if parameter in given else ''}{inside})"


def _places(own: Mapping[str, Parameter]) -> dict[str, Place]:
    """Return the keywords of the checked classes that a call takes, such as options, with their places."""
    found: dict[str, Place] = {}
    for parameter, each in own.items():
        annotation = re.fullmatch(_A_CLASS, str(each.annotation))
        if annotation is not None and (kind := _classes.get(annotation[1])) is not None:
            fields = _parameters(_known[kind])
            here = ((parameter, kind),)
            deeper = {keyword: (*here, *place) for keyword, place in _places(fields).items()}
            found = dict.fromkeys(fields, here) | deeper | found
    return {keyword: place for keyword, place in found.items() if keyword not in own}


def _taker(name: str, keyword: str) -> str | None:
    """Return a call with a keyword that another call lacks; calls that take it as options come first."""
    if name.startswith(tuple(f"{namespace}." for namespace in _NAMESPACES.values())):
        return None
    calls = [call for first in _FIRST if (call := f"reknit.{first}") in _known and call != name]
    calls.sort(key=lambda call: not _takes(call, name))
    return next((call for call in calls if keyword in _parameters(_known[call])), None)


def _takes(call: str, kind: str) -> bool:
    """Return whether a call has a parameter for an object of a checked class."""
    annotations = (
        re.fullmatch(_A_CLASS, str(each.annotation)) for each in _parameters(_known[call]).values()
    )
    return any(each is not None and _classes.get(each[1]) == kind for each in annotations)


def _called(name: str) -> str:
    """Return the word for the keywords of a call: option or keyword."""
    return "option" if name.endswith("Options") else "keyword"


def _is_needed(parameter: Parameter) -> bool:
    variable = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    return parameter.default is Parameter.empty and parameter.kind not in variable


def _parameters(function: Callable[..., Any]) -> Mapping[str, Parameter]:
    return signature(function).parameters


def _spelled(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={shown(value)}" for name, value in options.items())
