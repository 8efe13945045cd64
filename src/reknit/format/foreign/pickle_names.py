"""Which names does a pickle mean, and which of Python's own may it call?

Nothing is called here or elsewhere.  A call of a class whose objects are plain data leaves one value unread,
and the rest of the file opens.  A call of any other function of Python (`os.system`, `eval`) is the mark of
an attack, and closes the file.
"""

from __future__ import annotations

import builtins
import sys
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING

MAX_NAME = 1_000
"""Characters of a name: a few bytes of a pickle can repeat a name with one large text."""

MAKES_OBJECT = frozenset({"copyreg._reconstructor", "copyreg.__newobj__", "copyreg.__newobj_ex__"})
"""Functions that make an object of the class that is their first argument, as the opcode NEWOBJ does."""
_APPLIES = frozenset(
    {"builtins.filter", "builtins.map", "functools.reduce", "itertools.starmap", "operator.call"}
)
"""Functions that call their first argument."""

_DATA_MODULES = frozenset(
    {
        "array",
        "ast",
        "calendar",
        "collections",
        "datetime",
        "decimal",
        "enum",
        "fractions",
        "ipaddress",
        "itertools",
        "pathlib",
        "random",
        "typing",
        "uuid",
        "zoneinfo",
    }
)
"""Modules of the standard library whose names make values, and act on nothing else."""
_VALUES = {
    "io": "BytesIO StringIO",
    "struct": "Struct",
    "builtins": (
        "bool bytearray bytes complex dict enumerate float frozenset getattr int iter list memoryview object "
        "range reversed set slice str tuple type zip"
    ),
    "functools": "partial",
    "http": "HTTPMethod HTTPStatus",
    "inspect": "Parameter Signature _ParameterKind",
    "logging": "Formatter Logger PercentStyle StrFormatStyle StringTemplateStyle getLogger",
    "operator": "attrgetter getitem itemgetter methodcaller or_",
    "os": "stat_result terminal_size",
    "platform": "uname_result",
    "re": "RegexFlag _compile",
    "signal": "Handlers Sigmasks Signals",
    "socket": "AddressFamily AddressInfo MsgFlag SocketKind",
    "ssl": "AlertDescription Options TLSVersion VerifyFlags VerifyMode",
    "time": "struct_time",
    "types": "GenericAlias MappingProxyType SimpleNamespace UnionType",
}
"""Names of other modules that objects without code need: enumerations, records, types, nested classes."""
_CALLABLE = frozenset(f"{module}.{name}" for module, names in _VALUES.items() for name in names.split()) | {
    f"builtins.{name}"
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and issubclass(kind, BaseException)
}


def full_name(module: str, name: str, protocol: int) -> str:
    """Return the name that a pickle means.  Protocols below 3 write the names that Python 2 had."""
    if protocol < 3:
        if (module, name) in NAME_MAPPING:
            module, name = NAME_MAPPING[module, name]
        else:
            module = IMPORT_MAPPING.get(module, module)
    return f"{module}.{name}"


def is_standard(name: str) -> bool:
    """Return whether a name is one of Python's own modules."""
    return name.partition(".")[0] in sys.stdlib_module_names


def applies(name: str) -> bool:
    """Return whether a name of Python's own modules stands for a function that calls its first argument."""
    return _public(name) in _APPLIES


def makes_data(name: str) -> bool:
    """Return whether a name of Python's own modules stands for a class of plain data, or a maker of such."""
    return _public(name) in _CALLABLE or _public(name).partition(".")[0] in _DATA_MODULES


def _public(name: str) -> str:
    """Return a name without the mark of a module in C, such as `_functools` for `functools`."""
    return name.removeprefix("_")
