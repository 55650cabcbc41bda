"""A place for copies in an object store: S3, Google Cloud Storage, Azure. The only module with obstore.

Addresses and credentials come from the environment, as obstore reads it (``AWS_ENDPOINT_URL``,
``AWS_ACCESS_KEY_ID``, ``GOOGLE_SERVICE_ACCOUNT``, ``AZURE_STORAGE_ACCOUNT_NAME`` and others). Each
body that goes to S3 is signed with its SHA-256, which the server compares.

A request without an answer ends after two minutes. obstore sends it again, unless it has a condition:
then the call fails, and the job's next attempt finds what became of it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from datetime import timedelta
from typing import Any

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError
from obstore.store import from_url

from ckptfsm.core.documents import MAX_DOCUMENT_BYTES
from ckptfsm.core.errors import ConfigError, DamagedRoot, PlaceFailed, describe

_DIGEST = "ckptfsmdigest"  # of the metadata; Azure takes no hyphen
_PART_BYTES = 8 << 20
_MOST_PARTS = 9000  # S3 takes 10,000
_IN_FLIGHT_BYTES = 32 << 20  # of one file
_PIECE_BYTES = 4 << 20
_TRIES = 5
_PAUSE_S = 0.1
_SILENCE_S = 120.0  # until the first byte of an answer, or the next one
_LONGEST_S = 86_400.0  # of a whole answer, also if it was cut and goes on
_RETRIES = 5
_XML = re.compile(r"<\?xml.*?\?>")
_ANSWER = re.compile(r"status code: (\d+).*?<Code>(\w+)</Code>(?:.*?<Message>(.*?)</Message>)?")
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound", "bucket does not exist")
_REGION = "is the bucket in another region? Set AWS_REGION"
_KEYS = "are these the right credentials?"
_MEANING = (  # of an error's code, or of words in it
    ("TimeTooSkewed", "the clock of this machine is wrong: set it"),
    ("ExpiredToken", "the credentials have expired: start the job again with new ones"),
    ("InvalidAccessKeyId", _KEYS),
    ("SignatureDoesNotMatch", _KEYS),
    ("AuthorizationHeaderMalformed", _REGION),
    ("PermanentRedirect", _REGION),
    ("without LOCATION", _REGION),
    ("Quota", "there is no room in the bucket; what was copied stays, and counts"),
    ("StorageFull", "there is no room in the bucket; what was copied stays, and counts"),
)


def store_at(url: str) -> Any:
    """The store of a URL, with its prefix. Raises ``ConfigError`` if that cannot be one."""
    options = {
        # A lower limit would end each large file that comes slowly but surely.
        "timeout": timedelta(seconds=_LONGEST_S),
        "read_timeout": timedelta(seconds=_SILENCE_S),
        "connect_timeout": timedelta(seconds=10),
        "allow_http": True,  # for an address that the user gives with http://, and for no other
    }
    # Counted from the beginning: later, a file that is cut would begin anew.
    retries = {"max_retries": _RETRIES, "retry_timeout": timedelta(seconds=_LONGEST_S)}
    try:
        return from_url(url, client_options=options, retry_config=retries)
    except (BaseError, ValueError) as error:
        raise ConfigError(f"{url}: {_words_of_store(error)}", key="copies", url=url) from error


class ObjectPlace:
    """See ``place.CopyPlace``."""

    def __init__(self, store: Any, where: str) -> None:
        self._store = store
        self.where = where.rstrip("/")

    def names(self) -> list[str]:
        with self._named("", "list"):
            found = obstore.list_with_delimiter(self._store)["common_prefixes"]
            return [prefix.rstrip("/").rpartition("/")[2] for prefix in found]

    def listed(self, directory: str) -> Mapping[str, int]:
        start = f"{directory}/"
        with self._named(directory, "list"):
            batches = obstore.list(self._store, prefix=start, chunk_size=1000)
            return {
                meta["path"].removeprefix(start): meta["size"] for some in batches for meta in some
            }

    def digest(self, name: str) -> str | None:
        with self._named(name, "head"):
            try:
                found = obstore.get(self._store, name, options={"head": True})
            except FileNotFoundError:
                return None
            said: str | None = found.attributes.get(_DIGEST)
            return said

    def read(self, name: str) -> bytes | None:
        found = self._read(name)
        return found[0] if found is not None else None

    def _read(self, name: str) -> tuple[bytes, Any] | None:
        with self._named(name, "get"):
            try:
                found = obstore.get(self._store, name)
            except FileNotFoundError as error:
                if _lacks_bucket(error):
                    raise
                return None
            if found.meta["size"] > MAX_DOCUMENT_BYTES:
                raise DamagedRoot(
                    f"an object of {found.meta['size']} bytes, and a small one is expected",
                    place=self.where,
                    object=name,
                )
            return bytes(found.bytes()), found.meta

    def stream(self, name: str) -> Generator[bytes, None, None]:
        with self._named(name, "get", missing=True):
            for piece in obstore.get(self._store, name).stream(min_chunk_size=_PIECE_BYTES):
                yield bytes(piece)

    def create(self, name: str, data: bytes) -> bytes:
        for number in range(_TRIES):
            with self._named(name, "create"):
                try:
                    obstore.put(self._store, name, data, mode="create", use_multipart=False)
                except (AlreadyExistsError, PreconditionError):
                    # S3's "conflicting operation" is told so, too: then nothing may be there.
                    time.sleep(_PAUSE_S * number)
            found = self.read(name)
            if found is not None:
                return found
        raise PlaceFailed("it can neither be created nor read", place=self.where, object=name)

    def replace(self, name: str, data: bytes, expected: bytes) -> bool:
        found = self._read(name)
        if found is None or found[0] != expected:
            return False
        version = {key: found[1][key] for key in ("e_tag", "version") if found[1].get(key)}
        with self._named(name, "replace"):
            try:
                obstore.put(self._store, name, data, mode=version, use_multipart=False)
            except (AlreadyExistsError, PreconditionError):
                return self.read(name) == data  # the answer to the first request may be lost
        return True

    def put(self, name: str, pieces: Iterator[bytes], size: int, digest: str) -> None:
        part = max(_PART_BYTES, -(-size // _MOST_PARTS))
        watched = _Pieces(pieces)
        with closing(watched), self._named(name, "put", watched):
            body: Any = watched if size > _PART_BYTES else b"".join(watched)
            obstore.put(
                self._store,
                name,
                body,
                attributes={_DIGEST: digest},
                use_multipart=size > _PART_BYTES,
                chunk_size=part,
                max_concurrency=max(1, _IN_FLIGHT_BYTES // part),
            )

    def remove(self, name: str) -> None:
        with self._named(name, "delete"):
            try:
                obstore.delete(self._store, name)
            except FileNotFoundError:  # as S3 does: it tells nothing of what was not there
                return

    def remove_empty(self, directory: str) -> None:
        """Nothing: there are no directories."""

    @contextmanager
    def _named(
        self, name: str, call: str, pieces: _Pieces | None = None, *, missing: bool = False
    ) -> Iterator[None]:
        """Name place and object in errors of the store. What ``pieces`` raised is raised as it is.

        ``missing``: that an object is not there is the caller's to tell.
        """
        try:
            yield
        except (BaseError, OSError, ValueError) as error:
            if pieces is not None and pieces.error is not None:
                raise pieces.error from None
            absent = isinstance(error, FileNotFoundError) and not _lacks_bucket(error)
            if isinstance(error, PlaceFailed) or (missing and absent):
                raise
            raise PlaceFailed(
                f"{self.where}/{name}: {call}: {_words_of_store(error)}",
                place=self.where,
                object=name,
                call=call,
            ) from error


class _Pieces:
    """The pieces of a file, and the error that ended them: the store tells it in its own words.

    They are made on another thread: on the store's own, a look at the claim would call into the store
    while it waits for them, which it does not bear.
    """

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._beside = ThreadPoolExecutor(1)
        self.error: BaseException | None = None

    def close(self) -> None:
        self._beside.shutdown()

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        try:
            piece = self._beside.submit(next, self._pieces, None).result()
        except BaseException as error:
            self.error = error
            raise
        if piece is None:
            raise StopIteration
        return piece


def _lacks_bucket(error: FileNotFoundError) -> bool:
    """True if it is the bucket that is not there."""
    return any(word in str(error) for word in _NO_BUCKET)


def _words_of_store(error: BaseException) -> str:
    """The words of an error of the store, in a line, without the structures that it shows below.

    Of an answer of the server, its status, code and message are told, and what they mean.
    """
    words = " ".join(_XML.sub("", str(error).partition("Debug source:")[0]).split())
    if answer := _ANSWER.search(words):
        status, code, message = answer.groups()
        words = f"{status} {code}: {message or 'no reason is told'}"
    meant = next((meaning for word, meaning in _MEANING if word in words), "")
    return describe(type(error)(f"{meant}: {words}" if meant else words or "no reason is told"))
