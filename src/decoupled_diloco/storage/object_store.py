"""Objects in a bucket, in a folder or in memory: S3, GCS, Azure, ``file://`` and ``memory://``.

An address is ``scheme://bucket/prefix``. obstore, a library in Rust, sends the requests. It takes
credentials, region and endpoint from the environment or from the machine's own role, never from an
address. An object appears whole or not at all, and the next read or list shows it.

Every error is one sentence: `ConfigError` if only a user can fix it (no such bucket, no permission,
no region), `StorageError` if the store is unreachable and a later request may succeed.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote, urlsplit

from decoupled_diloco.config.addresses import require_store
from decoupled_diloco.errors import ConfigError, StorageError

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

_T = TypeVar("_T")

INSTALL = "run pip install -e '.[store]' in the clone"
"""How to install the extra."""

PART_BYTES = 8 << 20
"""Bytes of a part of a large upload or download."""

PARTS_AT_ONCE = 2
"""Parts of one upload that are in memory at a time."""

PARTS_MAX = 9_000
"""Parts of one upload; S3 allows 10,000. Larger files get larger parts."""

REQUEST_SECONDS = 60.0
"""Longest time for one request, so a link needs at least 0.2 MB/s per part in transfer."""

RETRIES = 2
"""Repetitions of a failed request before the caller receives the error."""

_MEMORY: dict[str, Any] = {}
"""The stores of ``memory://`` addresses in this process, by bucket."""

_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
"""Variables with the credentials, by the scheme of the address."""

_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
"""Variables with the URL of another service, by the scheme of the address."""

_REFUSALS: tuple[tuple[str, str, str], ...] = (
    # text in the store's answer, what is wrong, the fix
    (
        "NoSuchBucket|ContainerNotFound|(bucket|container) does not exist|Unable to canonicalize",
        "does not exist",
        "create the {bucket}, or correct the address",
    ),
    (
        "InvalidBucketName|InvalidResourceName|OutOfRangeInput",
        "has a {bucket} name that is not valid",
        "correct the address",
    ),
    (
        "ExpiredToken|TokenRefreshRequired|token has expired|AuthenticationFailed(?s:.*)[Ee]xpir",
        "refuses this process, because its credentials have expired",
        "renew them, and start the command again in that environment",
    ),
    (
        "service account file|[Cc]redentials? file|Invalid Access Key",
        "cannot be used, because the credentials of this process cannot be read",
        "check {credentials}",
    ),
    (
        "InvalidAccessKeyId|SignatureDoesNotMatch|InvalidToken|401 Unauthorized|invalid_grant"
        "|failed to authenticate",
        "does not accept the credentials of this process",
        "check {credentials}, or the role of this machine{service}",
    ),
    (
        "without LOCATION|PermanentRedirect|AuthorizationHeaderMalformed|IllegalLocation"
        "|MissingRegion|missing region",
        "is in another region than the requests",
        "set AWS_REGION to the region of the bucket",
    ),
    (
        "169.254.169.254|metadata.google.internal|[Mm]issing.*[Cc]redent",
        "cannot be used, because this process has no credentials",
        "set {credentials}, or give this machine a role",
    ),
    ("Account must be specified", "has no account", "set AZURE_STORAGE_ACCOUNT_NAME"),
    (
        "AccessDenied|403 Forbidden|AuthorizationPermissionMismatch|Permission denied",
        "forbids this request",
        "allow this process to list, read, write and delete objects below the address",
    ),
)


@dataclass(frozen=True, slots=True)
class StoredObject:
    """The name of an object below the store's address, and its size in bytes.

    ``modified`` is when it was written, seconds since the Unix epoch by the store's clock.
    """

    name: str
    nbytes: int
    modified: float


class Objects:
    """The objects below one address. Methods may be called from any thread.

    Args:
        address: For example ``s3://bucket/runs/x``; see `config.addresses.require_store`.
        create: Whether to create the folder of a ``file://`` address.
        request_seconds: The longest time for one request, greater than 0.
        retries: Repetitions of a request that has failed, 0 or more.

    Raises:
        ConfigError: The address is not valid, or obstore is not installed.
    """

    def __init__(
        self,
        address: str,
        *,
        create: bool = True,
        request_seconds: float = REQUEST_SECONDS,
        retries: int = RETRIES,
    ) -> None:
        require_store("store", address)
        self.address = address.rstrip("/")
        self._store = _opened(self.address, create, request_seconds, retries)

    def get(self, name: str) -> bytes | None:
        """Return an object's content; ``None`` if it does not exist."""
        obstore = _obstore()
        try:
            return self._request(lambda: bytes(obstore.get(self._store, name).bytes()))
        except FileNotFoundError:
            return None

    def put(self, name: str, content: bytes) -> None:
        """Write an object, and replace an earlier one of that name."""
        self._request(lambda: _obstore().put(self._store, name, content))

    def create(self, name: str, content: bytes) -> bool:
        """Write an object unless it exists; return whether this call created it.

        Of several processes that create one name, one succeeds. If the answer to a successful call
        was lost, a repetition returns False: compare the content.
        """
        from obstore.exceptions import AlreadyExistsError

        def create() -> bool:
            try:
                _obstore().put(self._store, name, content, mode="create")
            except AlreadyExistsError:
                return False
            return True

        return self._request(create)

    def upload(self, name: str, pieces: Iterable[bytes], nbytes: int) -> None:
        """Write an object from pieces of any sizes; at most a few parts of it are in memory.

        Args:
            name: The object.
            pieces: Its content.
            nbytes: Its size.
        """
        part = max(PART_BYTES, -(-nbytes // PARTS_MAX))
        if nbytes <= part:
            self.put(name, b"".join(pieces))
            return
        self._request(
            lambda: _obstore().put(
                self._store, name, iter(pieces), chunk_size=part, max_concurrency=PARTS_AT_ONCE
            )
        )

    def download(self, name: str, target: IO[bytes]) -> int:
        """Append an object to an open file, and return its size in bytes.

        Raises:
            FileNotFoundError: The object does not exist.
        """

        def download() -> int:
            nbytes = 0
            found = _obstore().get(self._store, name)
            for part in found.stream(min_chunk_size=PART_BYTES):
                nbytes += target.write(part)
            return nbytes

        return self._request(download)

    def listed(self, prefix: str, after: str = "") -> Iterator[StoredObject]:
        """Yield the objects in a folder, in any order.

        Args:
            prefix: The folder, without a slash at its end.
            after: Yield only names after this one.
        """
        pages = iter(_obstore().list(self._store, prefix, offset=after or None))
        while (page := self._request(lambda: next(pages, None))) is not None:
            for meta in page:
                # Not every store takes `offset` into account.
                if str(meta["path"]).startswith(f"{prefix}/") and str(meta["path"]) > after:
                    modified = meta["last_modified"].timestamp()
                    yield StoredObject(str(meta["path"]), int(meta["size"]), modified)

    def folders(self, prefix: str) -> list[str]:
        """Return the names of the folders in a folder, in order."""
        found = self._request(lambda: _obstore().list_with_delimiter(self._store, prefix))
        return sorted(str(each).rpartition("/")[2] for each in found["common_prefixes"])

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects; those that do not exist count as deleted."""
        try:
            if names:
                self._request(lambda: _obstore().delete(self._store, list(names)))
        except FileNotFoundError:
            # The request ends at the first object that does not exist. The others may remain.
            for name in names if len(names) > 1 else ():
                self.delete([name])

    def _request(self, request: Callable[[], _T]) -> _T:
        """Make a request.

        Raises:
            FileNotFoundError: The object does not exist.
            ConfigError: Only a user can fix the error.
            StorageError: The store is unreachable.
        """
        from obstore.exceptions import BaseError

        try:
            return request()
        except (BaseError, OSError) as error:
            refusal = _refusal(self.address, str(error))
            if isinstance(error, FileNotFoundError) and not isinstance(refusal, ConfigError):
                raise
            raise refusal from error


def temporary_folder(owner: object) -> Path:
    """Return a new folder that is deleted with its owner, or when this process ends."""
    place = tempfile.mkdtemp(prefix="ddiloco-")
    weakref.finalize(owner, shutil.rmtree, place, ignore_errors=True)
    return Path(place)


def _refusal(address: str, text: str) -> ConfigError | StorageError:
    scheme = urlsplit(address).scheme
    endpoint = next((name for name in _ENDPOINTS.get(scheme, ()) if os.environ.get(name)), "")
    is_aws = scheme == "s3" and not endpoint
    words = {
        "bucket": "container" if scheme == "az" else "bucket",
        "credentials": _CREDENTIALS.get(scheme, ""),
        "service": ", or set AWS_ENDPOINT_URL if the bucket is not at AWS" if is_aws else "",
    }
    for pattern, wrong, fix in _REFUSALS:
        if re.search(pattern, text):
            return ConfigError(f"store={address!r} {wrong}: {fix}".format(**words))
    if scheme == "file":
        fix = "check that the folder is mounted and writable, and that its disk is not full"
    else:
        fix = f"check the network and {endpoint}" if endpoint else "check the network"
    return StorageError(f"store={address!r} is unreachable ({_in_short(text)}): {fix}")


def _in_short(text: str) -> str:
    """Return an error without the times, numbers and markup around its reason.

    >>> _in_short("Generic S3 error: Error performing GET http://host/b?list-type=2 in 2.1ms, "
    ... "after 2 retries, max_retries: 2, retry_timeout: 180s  - HTTP error: refused")
    'GET http://host/b: HTTP error: refused'
    """
    first = text.split("\n", 1)[0]
    first = re.sub(r"^Generic \w+ error: |Error performing |list request: |<\?xml.*", "", first)
    first = re.sub(r"(\?\S*)? in [\d.]+[^\s,]*(, after [^-]*)? - ", ": ", first)
    return first.strip(" :")[:200]


def _obstore() -> Any:
    try:
        import obstore
    except ImportError:
        raise ConfigError(
            f"an object store needs obstore, which is in the extra store: {INSTALL}"
        ) from None
    return obstore


def _opened(address: str, create: bool, request_seconds: float, retries: int) -> ObjectStore:
    _obstore()
    from obstore.exceptions import BaseError
    from obstore.store import LocalStore, MemoryStore, from_url

    parts = urlsplit(address)
    try:
        if parts.scheme == "file":
            return LocalStore(Path(unquote(parts.path)), mkdir=create)
        if parts.scheme == "memory":
            memory: ObjectStore = _MEMORY.setdefault(parts.netloc + parts.path, MemoryStore())
            return memory
        client: ClientConfig = {
            "timeout": timedelta(seconds=request_seconds),
            "connect_timeout": timedelta(seconds=min(10.0, request_seconds)),
        }
        endpoints = [os.environ.get(name, "") for name in _ENDPOINTS[parts.scheme]]
        if any(each.startswith("http://") for each in endpoints):
            client["allow_http"] = True  # the endpoint already says so
        retry: RetryConfig = {
            "max_retries": retries,
            "retry_timeout": timedelta(seconds=request_seconds * (1 + retries)),
        }
        return from_url(address, client_options=client, retry_config=retry)
    except (BaseError, OSError, ValueError) as error:
        raise _refusal(address, str(error)) from error
