"""Receives the form of an upload: its file goes to the disk as it comes, its few other fields into memory."""

from __future__ import annotations

import asyncio
from typing import BinaryIO, NamedTuple

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect, Request

from pdjax.api.errors import BodyTooLarge, InvalidField
from pdjax.api.transport import ClientGone
from pdjax.errors import BadRequest, DeadlineExceeded

MAX_FORM_BYTES = 64 << 10
"""What may come around the file itself in the body of an upload."""

WRITE_BYTES = 1 << 20


class Upload(NamedTuple):
    """A file that has been written whole."""

    filename: str
    num_bytes: int


class FormReader:
    """A form with one file, read piece by piece. After `feed` has raised it is of no use any more."""

    def __init__(self, content_type: str):
        """Raises BadRequest for what is no multipart form."""
        kind, options = parse_options_header(content_type)
        if kind != b"multipart/form-data" or not options.get(b"boundary"):
            raise BadRequest("the request body must be multipart/form-data with a boundary")
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.is_whole = False
        self._header = self._value = self._disposition = b""
        self._field: str | None = None  # of the part that is being read; None: it is the file
        self._field_data = bytearray()
        self._file_data: list[bytes] = []
        self._parser = MultipartParser(
            options[b"boundary"],
            {
                "on_part_begin": self._begin_part,
                "on_header_field": self._read_header,
                "on_header_value": self._read_value,
                "on_header_end": self._end_header,
                "on_headers_finished": self._end_headers,
                "on_part_data": self._read_data,
                "on_part_end": self._end_part,
                "on_end": self._end,
            },
        )

    def feed(self, data: bytes) -> bytes:
        """The part of `data` that belongs to the file. Raises BadRequest for a form that is broken or has a second file."""
        self._file_data.clear()
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise BadRequest(f"the form is broken: {error}") from None
        return b"".join(self._file_data)

    def _begin_part(self) -> None:
        self._disposition = b""

    def _read_header(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _read_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = self._value
        self._header = self._value = b""

    def _end_headers(self) -> None:
        options = parse_options_header(self._disposition)[1]
        name = options.get(b"name", b"").decode(errors="replace")
        if b"filename" not in options:
            self._field, self._field_data = name, bytearray()
            return
        if name != "file" or self.filename is not None:
            raise InvalidField(f"an upload has one file, named 'file'; got {name[:100]!r} too", name[:100], "invalid_value")
        self._field, self.filename = None, options[b"filename"].decode(errors="replace")

    def _read_data(self, data: bytes, start: int, end: int) -> None:
        if self._field is None:
            self._file_data.append(data[start:end])
        else:
            self._field_data += data[start:end]

    def _end_part(self) -> None:
        if self._field is not None:
            self.fields[self._field] = self._field_data.decode(errors="replace")

    def _end(self) -> None:
        self.is_whole = True


async def receive_upload(http: Request, file: BinaryIO, max_file_bytes: int, timeout_s: float) -> Upload:
    """Write the file of an upload to `file`. Raises BadRequest naming the field at fault, BodyTooLarge before much more than
    `max_file_bytes` are held, DeadlineExceeded where the body takes longer than `timeout_s` to arrive.
    """
    announced = http.headers.get("content-length", "0")
    if len(announced) > 18 or int(announced) > max_file_bytes + MAX_FORM_BYTES:
        raise BodyTooLarge(max_file_bytes)
    form = FormReader(http.headers.get("content-type", ""))
    try:
        async with asyncio.timeout(timeout_s):
            num_bytes = await _copy_file(http, form, file, max_file_bytes)
    except TimeoutError:
        raise DeadlineExceeded(f"the upload has not arrived after {timeout_s:.1f} s") from None
    except ClientDisconnect:
        raise ClientGone("the client left while it was sending its file") from None
    _check(form, num_bytes)
    return Upload(form.filename or "file", num_bytes)


async def _copy_file(http: Request, form: FormReader, file: BinaryIO, max_file_bytes: int) -> int:
    num_bytes = num_other_bytes = 0
    unwritten = bytearray()
    async for data in http.stream():
        part = form.feed(data)
        unwritten += part
        num_bytes += len(part)
        num_other_bytes += len(data) - len(part)
        if num_bytes > max_file_bytes or num_other_bytes > MAX_FORM_BYTES:
            raise BodyTooLarge(max_file_bytes)
        if len(unwritten) >= WRITE_BYTES:
            await asyncio.to_thread(file.write, bytes(unwritten))
            unwritten.clear()
    file.write(unwritten)
    return num_bytes


def _check(form: FormReader, num_bytes: int) -> None:
    """Raises BadRequest naming the field at fault."""
    if not form.is_whole:
        raise BadRequest("the form is broken: it has no end")
    for name in form.fields.keys() - {"purpose", "file"}:
        raise InvalidField(f"{name[:100]} is not supported by this server", name[:100], "unsupported_parameter")
    if (purpose := form.fields.get("purpose")) is None:
        raise InvalidField("purpose is required, it must be 'batch'", "purpose", "missing_required_parameter")
    if purpose != "batch":
        raise InvalidField(f"purpose must be 'batch', got {purpose[:100]!r}", "purpose", "invalid_value")
    if form.filename is None:
        raise InvalidField("file is required, as a part of the form with a filename", "file", "missing_required_parameter")
    if not num_bytes:
        raise InvalidField("file is empty", "file", "empty_file")
