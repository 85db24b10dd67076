"""Content coding of a request's body, by its headers. The router cannot read a compressed body."""

from __future__ import annotations

from router.http.request import Refusal, Request

# Codings of RFC 9110 section 8.4.1, of RFC 7932 and 8878, and those with dictionaries (RFC 9842). Other words, such as
# the name of a charset, do not change a body, and engines ignore them.
_COMPRESSING = frozenset(
    (b"gzip", b"x-gzip", b"deflate", b"br", b"zstd", b"compress", b"x-compress", b"dcb", b"dcz", b"lz4", b"snappy")
)
SGLANGS = b"x-body-compressed"  # SGLang's own header, with SGLANG_ENABLE_REQUEST_DECOMPRESSION


def is_opaque(request: Request, *, must_read: bool) -> bool:
    """True if only an engine can read the body. Raises Refusal for a body that is compressed by `content-encoding`.
    With `must_read`, also for a body that is compressed by SGLang's own header."""
    fields = request.fields
    if b"content-encoding" in fields:
        values = [value for low, _, value in request.lines if low == b"content-encoding"]
        if not _COMPRESSING.isdisjoint(word.strip().lower() for value in values for word in value.split(b",")):
            raise _make_encoding_refusal()
    if fields.get(SGLANGS, b"").strip().lower() in (b"", b"identity"):
        return False
    if must_read:
        raise _make_encoding_refusal()
    return True


def _make_encoding_refusal() -> Refusal:
    return Refusal(415, "unsupported_encoding", "Compressed request bodies are not accepted.")
