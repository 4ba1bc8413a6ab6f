"""The XML that S3 answers listings with, and the XML it takes and answers deletions with. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from urllib.parse import unquote
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from s3kv.errors import StoreUnavailable
from s3kv.objects.answers import Call
from s3kv.objects.store import ObjectInfo

_NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"


def read_folders(body: bytes, call: Call, prefix: str) -> Sequence[str]:
    """The common prefixes of a listing with a delimiter, without `prefix` and slash. Raises
    `StoreUnavailable`."""
    try:
        root = ElementTree.fromstring(body)
        whole = [unquote(_text(item, "Prefix")) for item in root.iterfind("{*}CommonPrefixes")]
    except (ElementTree.ParseError, ValueError) as error:
        raise StoreUnavailable(f"{call}: the listing cannot be read: {error}") from error
    return [name[len(prefix) :].rstrip("/") for name in whole]


def read_page(body: bytes, call: Call) -> tuple[Sequence[ObjectInfo], str | None]:
    """One page of ListObjectsV2: its objects, and the token of the next page. Raises
    `StoreUnavailable`."""
    try:
        root = ElementTree.fromstring(body)
        if not root.tag.endswith("ListBucketResult"):
            raise StoreUnavailable(f"{call}: the listing cannot be read: it is a {root.tag}")
        infos = [
            ObjectInfo(
                unquote(_text(item, "Key")),
                int(_text(item, "Size")),
                datetime.fromisoformat(
                    _text(item, "LastModified").replace("Z", "+00:00")
                ).timestamp(),
                item.findtext("{*}ETag") or "",
            )
            for item in root.iterfind("{*}Contents")
        ]
    except (ElementTree.ParseError, ValueError) as error:
        raise StoreUnavailable(f"{call}: the listing cannot be read: {error}") from error
    return infos, root.findtext("{*}NextContinuationToken")


def deletion(objects: Sequence[ObjectInfo]) -> bytes:
    """The body of DeleteObjects: each object only if its ETag is still this one, and no word in the
    answer of those that went."""
    items = "".join(
        f"<Object><Key>{escape(info.key)}</Key>{_etag(info)}</Object>" for info in objects
    )
    text = f'<Delete xmlns="{_NAMESPACE}"><Quiet>true</Quiet>{items}</Delete>'
    return text.encode("utf-8")


def _etag(info: ObjectInfo) -> str:
    return f"<ETag>{escape(info.etag)}</ETag>" if info.etag else ""


def read_deletion(body: bytes, call: Call) -> Mapping[str, Mapping[str, str]]:
    """What DeleteObjects could not delete: key to the members of its error (Code, Message). Raises
    `StoreUnavailable` for an answer that cannot be read: what has been deleted is not known."""
    try:
        root = ElementTree.fromstring(body)
        if not root.tag.endswith("DeleteResult"):
            raise StoreUnavailable(f"{call}: the answer cannot be read: it is a {root.tag}")
        return {
            _text(item, "Key"): {child.tag.rpartition("}")[2]: child.text or "" for child in item}
            for item in root.iterfind("{*}Error")
        }
    except (ElementTree.ParseError, ValueError) as error:
        raise StoreUnavailable(f"{call}: the answer cannot be read: {error}") from error


def _text(item: ElementTree.Element, name: str) -> str:
    text = item.findtext(f"{{*}}{name}")
    if text is None:
        raise ValueError(f"there is no {name}")
    return text
