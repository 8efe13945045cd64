"""A tombstone in the place of a manifest, and a manifest with another byte: a late commit loses against both.

An object store may carry out a commit after its process has given up.  The commit has a condition: there is
no manifest, or the manifest is unchanged.  So a tombstone, or a change of the manifest, refuses it for good
(docs/decisions/0029).
"""

from __future__ import annotations

import re
import uuid

from reknit.format.checksum import digest
from reknit.format.manifest_file import decode_record
from reknit.format.versions import FORMAT_VERSION, TOMBSTONE

_HEAD_OF_ANY = re.compile(
    rb'\{"format":"reknit","format_version":\d+,"requires":\["%s"\]' % TOMBSTONE.encode()
)
"""The begin of a tombstone of any version: a later one may write its own number."""
_HEAD = f'{{"format":"reknit","format_version":{FORMAT_VERSION},"requires":["{TOMBSTONE}"]'.encode()
_TAIL_NBYTES = len(',"digest":"0123456789abcdef"}')
_CHANGE = re.compile(rb',"changed":"[0-9a-f]{32}"\Z')
_CHANGE_NBYTES = len(',"changed":""') + 32


def encode_tombstone() -> bytes:
    """Return the bytes of a new tombstone, which differ from those of all others."""
    return _with_digest(_HEAD + _change())


def is_tombstone(head: bytes) -> bool:
    """Return whether a file with the name of the manifest is a tombstone, by its first bytes."""
    return _HEAD_OF_ANY.match(head) is not None


def changed(manifest: bytes) -> bytes:
    """Return a manifest with the same content and other bytes.

    A store may derive the version of an object from its bytes, so these must differ.  Raises as
    `decode_record` does: a manifest that cannot be read stays as it is.
    """
    decode_record(manifest)
    body = manifest[:-_TAIL_NBYTES]
    if _CHANGE.search(body, len(body) - _CHANGE_NBYTES):
        body = body[:-_CHANGE_NBYTES]
    return _with_digest(body + _change())


def _change() -> bytes:
    return f',"changed":"{uuid.uuid4().hex}"'.encode()


def _with_digest(body: bytes) -> bytes:
    return body + f',"digest":"{digest(body):016x}"}}'.encode()
