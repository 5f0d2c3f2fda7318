"""Objects in folders and in memory: whole, created once, and with one sentence for each error."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

pytest.importorskip("obstore", reason="obstore is not installed: pip install -e '.[store]'")

from decoupled_diloco.errors import ConfigError, DilocoError, StorageError
from decoupled_diloco.storage import object_store
from decoupled_diloco.storage.object_store import PART_BYTES, Objects


@pytest.fixture(params=["file", "memory"])
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> Objects:
    place = {"file": f"{tmp_path}/a%20bucket", "memory": f"{tmp_path.name}/x"}[request.param]
    return Objects(f"{request.param}://{place}")


def test_an_object_is_written_read_listed_and_deleted(objects: Objects) -> None:
    assert objects.get("a/1") is None
    objects.put("a/1", b"one")
    objects.put("a/2", b"two")
    objects.put("ab/3", b"another folder")
    assert objects.get("a/1") == b"one"
    assert sorted((e.name, e.nbytes) for e in objects.listed("a")) == [("a/1", 3), ("a/2", 3)]
    assert [each.name for each in objects.listed("a", after="a/1")] == ["a/2"]
    # Some stores stop at the first object that does not exist, but not at once.
    objects.delete([*(f"a/none-{number}" for number in range(50)), "a/1"])
    assert [each.name for each in objects.listed("a")] == ["a/2"]


def test_one_of_two_creates_an_object(objects: Objects) -> None:
    assert objects.create("a", b"first")
    assert not objects.create("a", b"second")
    assert objects.get("a") == b"first"


def test_a_large_object_is_written_in_parts(objects: Objects) -> None:
    content = bytes(range(256)) * (PART_BYTES // 256 * 2 + 1)
    objects.upload("large", [content[:1000], content[1000:]], len(content))
    target = io.BytesIO()
    assert objects.download("large", target) == len(content)
    assert target.getvalue() == content


def test_an_object_that_does_not_exist_cannot_be_downloaded(objects: Objects) -> None:
    with pytest.raises(FileNotFoundError):
        objects.download("none", io.BytesIO())


def test_without_obstore_the_message_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ConfigError) as caught:
        Objects("s3://bucket/x")
    assert str(caught.value) == (
        "an object store needs obstore, which is in the extra store: run pip install -e '.[store]' "
        "in the clone"
    )


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        (
            "Error performing PUT http://h/b/x in 3ms - Server returned non-2xx status code: 404 "
            "Not Found: <Error><Code>NoSuchBucket</Code>",
            ConfigError,
            "store='s3://b/x' does not exist: create the bucket, or correct the address",
        ),
        (
            "403 Forbidden: <Code>AccessDenied</Code>",
            ConfigError,
            "store='s3://b/x' forbids this request: allow this process to list, read, write and "
            "delete objects below the address",
        ),
        (
            "400 Bad Request: <Code>ExpiredToken</Code>",
            ConfigError,
            "store='s3://b/x' refuses this process, because its credentials have expired: renew "
            "them, and start the command again in that environment",
        ),
        (
            "Received redirect without LOCATION, this normally indicates an incorrectly configured "
            "region",
            ConfigError,
            "store='s3://b/x' is in another region than the requests: set AWS_REGION to the region "
            "of the bucket",
        ),
        (
            "Generic S3 error: Error performing GET http://h/b?list-type=2 in 2.1ms, after 2 "
            "retries, max_retries: 2, retry_timeout: 180s  - HTTP error: error sending request",
            StorageError,
            "store='s3://b/x' is unreachable (GET http://h/b: HTTP error: error sending request): "
            "check the network",
        ),
    ],
)
def test_an_error_is_one_sentence(answer: str, kind: type[DilocoError], message: str) -> None:
    error = object_store._refusal("s3://b/x", answer)
    assert type(error) is kind
    assert str(error) == message


def test_an_error_names_the_endpoint_where_it_may_be_the_fix(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unknown_key = "403 Forbidden: <Code>InvalidAccessKeyId</Code>"
    elsewhere = ", or set AWS_ENDPOINT_URL if the bucket is not at AWS"
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    assert str(object_store._refusal("s3://b/x", unknown_key)).endswith(elsewhere)
    assert "AWS_ENDPOINT_URL" not in str(object_store._refusal("s3://b/x", "connection refused"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://minio:9000")
    assert elsewhere not in str(object_store._refusal("s3://b/x", unknown_key))
    assert str(object_store._refusal("s3://b/x", "connection refused")) == (
        "store='s3://b/x' is unreachable (connection refused): check the network and "
        "AWS_ENDPOINT_URL"
    )
    assert "AWS" not in str(object_store._refusal("gs://b/x", "connection refused"))
    assert str(object_store._refusal("file:///b/x", "No space left on device")) == (
        "store='file:///b/x' is unreachable (No space left on device): check that the folder is "
        "mounted and writable, and that its disk is not full"
    )


@pytest.mark.parametrize(
    ("address", "answer", "message"),
    [
        (
            "gs://b/x",
            "Error performing token request: Error performing GET http://169.254.169.254/compute",
            "cannot be used, because this process has no credentials: set "
            "GOOGLE_APPLICATION_CREDENTIALS, or give this machine a role",
        ),
        (
            "gs://b/x",
            'Error performing token request: 400 Bad Request: {"error":"invalid_grant"}',
            "does not accept the credentials of this process: check "
            "GOOGLE_APPLICATION_CREDENTIALS, or the role of this machine",
        ),
        (
            "gs://b/x",
            "Error performing token request: Error performing POST https://oauth2.googleapis.com/"
            "token in 3ms - HTTP error: error sending request",
            "is unreachable (token request: POST https://oauth2.googleapis.com/token: HTTP error: "
            "error sending request): check the network",
        ),
        (
            "az://b/x",
            "404 Not Found: <Code>ContainerNotFound</Code>",
            "does not exist: create the container, or correct the address",
        ),
        (
            "az://b/x",
            "400 Bad Request: <Code>OutOfRangeInput</Code>",
            "has a container name that is not valid: correct the address",
        ),
        (
            "az://b/x",
            "403 Forbidden: <Code>AuthenticationFailed</Code><Message>no\n</Message>"
            "<AuthenticationErrorDetail>Signature not valid: Expiry [Sat]",
            "refuses this process, because its credentials have expired: renew them, and start the "
            "command again in that environment",
        ),
    ],
)
def test_an_error_names_what_the_cloud_of_the_address_needs(
    address: str, answer: str, message: str
) -> None:
    assert str(object_store._refusal(address, answer)) == f"store={address!r} {message}"


@pytest.mark.parametrize("content", [None, "{}"])
def test_credentials_that_cannot_be_read_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None
) -> None:
    file = tmp_path / "key.json"
    if content is not None:
        file.write_text(content)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
    with pytest.raises(ConfigError) as caught:
        Objects("gs://bucket/x")
    assert str(caught.value) == (
        "store='gs://bucket/x' cannot be used, because the credentials of this process cannot be "
        "read: check GOOGLE_APPLICATION_CREDENTIALS"
    )
