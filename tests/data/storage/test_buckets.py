"""S3's protocol through pyarrow: a moto server on the loopback, and answers that a relay cuts or replaces."""

import gzip
import http.client
from concurrent.futures import ThreadPoolExecutor

import pyarrow.fs
import pytest
from support.data.byte_tokenizer import ByteTokenizer
from support.data.stored_corpora import NAMES, build, corpus_files, dataset_bytes, lines, write_files
from support.data.stores import relaying
from support.selection import slow_but

from data_utils.build.config import BuildConfig
from data_utils.build.corpus import build_corpus
from data_utils.common.errors import ConfigError, DataError, UserError
from data_utils.corpus.inputs import expand_inputs
from data_utils.storage import buckets


@pytest.mark.parametrize("workers", slow_but([2], [0, 2]))
def test_a_build_from_a_bucket_has_the_bytes_of_local_files(tmp_path, bucket, workers):
    files = corpus_files()
    expected = build(write_files(tmp_path / "raw", files), tmp_path / "local")
    bucket.put_all(files, "raw")
    assert build(["s3://corpora/raw/*"], tmp_path / "remote", workers=workers) == expected
    written = b"".join(path.read_bytes() for path in tmp_path.glob("remote*"))
    assert b"CANARY" not in written and b"s3://corpora/raw/a.jsonl" in written


def test_cut_answers_and_no_request_above_the_range(tmp_path, bucket, moto_port, monkeypatch):
    monkeypatch.setattr("data_utils.storage.objects.RANGE_BYTES", 70_000)
    monkeypatch.setattr("data_utils.storage.buckets._SDK_ATTEMPTS", 1)
    files = corpus_files(100)
    expected = build(write_files(tmp_path / "raw", files), tmp_path / "local")
    urls = bucket.put_all(files, "raw")
    with relaying(moto_port, cuts=0.3) as relay:
        monkeypatch.setenv("AWS_ENDPOINT_URL", relay.url)
        assert build(urls, tmp_path / "remote") == expected
    asked = [asked for method, path, asked in relay.seen if method == "GET" and "list-type" not in path]
    assert len(asked) > len(NAMES)
    for text in asked:
        first, last = map(int, text.removeprefix("bytes=").split("-"))
        assert last - first < 70_000


def names(*patterns):
    return [str(path).removeprefix("s3://corpora/") for path in expand_inputs(patterns)]


def test_names_folders_and_globs(bucket, caplog):
    for key in (
        "a/1.jsonl",
        "a/2.jsonl",
        "a/b/3.jsonl",
        "a/[x].jsonl",
        "c/_SUCCESS",
        "c/part.jsonl",
        "c/.x.crc",
    ):
        bucket.put(key, b"{}\n")
    assert names("s3://corpora/a/2.jsonl", "s3://corpora/a/1.jsonl") == ["a/2.jsonl", "a/1.jsonl"]
    assert names("s3://corpora/a/") == names("s3://corpora/a") == names("s3://corpora/a/**")
    assert names("s3://corpora/a") == ["a/1.jsonl", "a/2.jsonl", "a/[x].jsonl", "a/b/3.jsonl"]
    assert names("s3://corpora/a/[12].jsonl") == ["a/1.jsonl", "a/2.jsonl"]
    assert names("s3://corpora/a/[x].jsonl") == ["a/[x].jsonl"]
    assert names("s3://corpora/**/3.jsonl") == names("s3://corpora/**3.jsonl") == ["a/b/3.jsonl"]
    assert names("s3://corpora/c") == ["c/part.jsonl"]
    assert "2 inputs are skipped" in caplog.text
    with pytest.raises(DataError, match=r"s3://corpora/a/b is a folder"):
        names("s3://corpora/a/*")
    for nothing in ("s3://corpora/d", "s3://corpora/a/*.gz", "s3://corpora/a/1"):
        with pytest.raises(DataError, match=f"input {nothing.replace('*', '.')} names no object"):
            names(nothing)
    bucket.put("d/data.bin", b"")
    bucket.put("e/data-0.arrow", b"x")
    bucket.put("e/state.json", b"{}")
    with pytest.raises(
        DataError, match=r"(?s)3 inputs .*d/data.bin has an unknown suffix.*e is a directory .*arrow"
    ):
        names("s3://corpora/d", "s3://corpora/e", "s3://corpora/none*")


def test_objects_are_pinned_some_at_a_time(bucket, monkeypatch):
    """All at once took 1.6 GB for a million."""
    numbers = []

    class Pool(ThreadPoolExecutor):
        def map(self, work, items):
            items = list(items)
            numbers.append(len(items))
            return super().map(work, items)

    monkeypatch.setattr(buckets, "ThreadPoolExecutor", Pool)
    monkeypatch.setattr(buckets, "_NOTED_AT_ONCE", 3)
    for number in range(7):
        bucket.put(f"a/{number}.jsonl", b"{}\n")
    assert names("s3://corpora/a/") == [f"a/{number}.jsonl" for number in range(7)]
    assert numbers == [3, 3, 1]


def test_globs_with_brackets(bucket):
    for key in ("a!.jsonl", "a].jsonl", "ab.jsonl", "a[!].jsonl"):
        bucket.put(key, b"{}\n")
    assert names("s3://corpora/a[!b].jsonl") == ["a!.jsonl", "a].jsonl"]
    assert names("s3://corpora/a[!]].jsonl") == ["a!.jsonl", "ab.jsonl"]
    assert names("s3://corpora/a[]].jsonl") == ["a].jsonl"]
    assert names("s3://corpora/?[!].jsonl") == ["a[!].jsonl"]
    with pytest.raises(DataError, match=r"a\[z-a\].jsonl has a \[...\] with a range"):
        names("s3://corpora/a[z-a].jsonl")


def test_names_with_empty_parts_are_refused_at_once(bucket, caplog):
    bucket.put("a/b.jsonl", b"{}\n")
    onward = http.client.HTTPConnection(*bucket.address)
    onward.request("PUT", "/corpora/a//c.jsonl", b"{}\n")
    assert onward.getresponse().status == 200
    for url in ("s3://corpora/a/", "s3://corpora/a//c.jsonl", "s3://corpora/a//", "s3://corpora/a//*"):
        with pytest.raises(DataError, match=r"s3://corpora/a/\S*: the name has an empty part"):
            names(url)
    assert "attempt" not in caplog.text


def test_a_replaced_object_is_refused(tmp_path, bucket):
    bucket.put("a.jsonl", lines("a", 100))
    [listed] = expand_inputs(["s3://corpora/a.jsonl"])
    assert listed.read(0, 10) == lines("a", 100)[:10]
    for replaced in (lines("b", 100), lines("b", 101)):  # of equal size, and in the same second mostly
        bucket.put("a.jsonl", replaced)
        with pytest.raises(DataError, match=r"s3://corpora/a.jsonl is not what it was"):
            listed.read(0, 10)
    bucket.system.delete_file("corpora/a.jsonl")
    with pytest.raises(DataError, match=r"s3://corpora/a.jsonl.* (no such object|not what it was)"):
        listed.read(10, 20)


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_stopped_build_goes_on_with_the_same_object_alone(tmp_path, bucket, is_replaced):
    expected = build(write_files(tmp_path / "raw", {"a.jsonl": lines("a", 500)}), tmp_path / "local")
    bucket.put("a.jsonl", lines("a", 500))

    class Stopped(ByteTokenizer):
        calls = 0

        def encode_batch(self, texts):
            Stopped.calls += 1
            if Stopped.calls > 3:
                raise DataError("stopped")
            return super().encode_batch(texts)

    config = BuildConfig(inputs=["s3://corpora/a.jsonl"], output=str(tmp_path / "d"), shard_bytes=30_000)
    with pytest.raises(DataError, match="stopped"):
        build_corpus(config, Stopped)
    if is_replaced:
        bucket.put("a.jsonl", lines("b", 500))
        with pytest.raises(DataError, match=r"another version of input s3://corpora/a.jsonl"):
            build_corpus(config, ByteTokenizer)
        return
    build_corpus(config, ByteTokenizer)
    assert dataset_bytes(tmp_path / "d") == expected


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((403, "AccessDenied"), "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
        ((403, "InvalidAccessKeyId"), "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
        ((401, "ExpiredToken"), "AWS_SESSION_TOKEN"),
        ((301, "PermanentRedirect"), "set AWS_REGION to eu-west-1"),
        ((400, "AuthorizationHeaderMalformed"), "set AWS_REGION to eu-west-1"),
        ((404, "NoSuchBucket"), "there is no bucket corpora"),
    ],
)
@pytest.mark.parametrize(
    "url", slow_but(["s3://corpora/a/*.jsonl"], ["s3://corpora/a.jsonl", "s3://corpora/a/*.jsonl"])
)
def test_refusals_are_one_line_that_names_what_to_set(monkeypatch, answer, words, url):
    with relaying(0, answer=answer) as relay:
        monkeypatch.setenv("AWS_ENDPOINT_URL", relay.url)
        with pytest.raises(DataError) as error:
            expand_inputs([url])
    assert words in str(error.value) and url in str(error.value)
    assert not {"WORDS", "CANARY"} & set(str(error.value).replace("-", " ").split())
    assert len(relay.seen) <= 4


def test_an_empty_region_is_looked_up(monkeypatch):
    """As an environment file writes what it does not set."""
    monkeypatch.delenv("AWS_REGION")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "")
    monkeypatch.setattr(pyarrow.fs, "resolve_s3_region", lambda name: "eu-west-1")
    bucket, _ = buckets.parse_bucket("s3://in-another-region/a.jsonl")
    assert bucket.file_system().region == "eu-west-1"


def test_a_bucket_that_is_gone_amid_the_work(monkeypatch, bucket):
    bucket.put("a.jsonl", lines("a", 10))
    [listed] = expand_inputs(["s3://corpora/a.jsonl"])
    with relaying(0, answer=(403, "AccessDenied")) as relay:
        monkeypatch.setenv("AWS_ENDPOINT_URL", relay.url)
        with pytest.raises(DataError, match="AWS_SECRET_ACCESS_KEY"):
            listed.read(0, 10)


@pytest.mark.parametrize(
    ("url", "error", "words"),
    [
        (
            "gs://corpora/a.jsonl",
            OSError(
                "google::cloud::Status(UNAVAILABLE: Retry policy exhausted, with a last message of Could not create a "
                "OAuth2 access token to authenticate the request. The request was not sent, CANARY"
            ),
            "GOOGLE_APPLICATION_CREDENTIALS",
        ),
        (
            "gs://corpora/a.jsonl",
            OSError("google::cloud::Status(PERMISSION_DENIED: CANARY has no"),
            "GOOGLE_APP",
        ),
        (
            "abfs://corpora@account.dfs.core.windows.net/a.jsonl",
            pyarrow.ArrowException(
                "Unknown error: Check for Hierarchical Namespace support on 'https://CANARY' failed: "
                "N5Azure4Core11Credentials23AuthenticationExceptionE: Failed to get token from DefaultAzureCredential."
            ),
            "AZURE_STORAGE_ACCOUNT_KEY",
        ),
        (
            "gs://corpora/a.jsonl",
            OSError("google::cloud::Status(UNAVAILABLE: CANARY"),
            "10 attempts in a row",
        ),
    ],
)
def test_words_of_other_stores_libraries_are_understood(monkeypatch, url, error, words):
    """What pyarrow says without credentials, of stores that no server here stands for."""

    class Refusing:
        def get_file_info(self, names):
            raise error

    monkeypatch.setattr("data_utils.storage.buckets._file_system", lambda *_: Refusing())
    with pytest.raises(DataError) as refused:
        expand_inputs([url])
    assert words in str(refused.value) and "CANARY" not in str(refused.value) and url in str(refused.value)


def test_a_pyarrow_without_a_store_is_one_line(monkeypatch):
    monkeypatch.delattr(pyarrow.fs, "AzureFileSystem")
    with pytest.raises(DataError, match=r"has no AzureFileSystem; install"):
        expand_inputs(["abfs://old@account.dfs.core.windows.net/a.jsonl"])


def test_busy_stores_end_after_ten_attempts(monkeypatch):
    monkeypatch.setattr("data_utils.storage.buckets._SDK_ATTEMPTS", 1)
    with relaying(0, answer=(503, "SlowDown")) as relay:
        monkeypatch.setenv("AWS_ENDPOINT_URL", relay.url)
        with pytest.raises(DataError, match=r"10 attempts in a row brought nothing \(.*503"):
            expand_inputs(["s3://corpora/a.jsonl"])
    assert len(relay.seen) == 10


@pytest.mark.parametrize(
    "url",
    [
        "s3://key:CANARY@corpora/a.jsonl",
        "s3://key:CA/CANARY@corpora/a.jsonl",
        "s3://corpora/a.jsonl?secret_key=CANARY",
        "s3://localhost:9000/corpora/a.jsonl",
        "s3:///a.jsonl",
        "s3://corp*/a.jsonl",
        "gs://key:CANARY@corpora/a.jsonl",
        "az://corpora/a.jsonl",
        "ftp://user:CANARY@host/a.jsonl",
    ],
)
def test_urls_of_another_form_are_one_line_without_what_is_secret(url, monkeypatch):
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(UserError) as error:
        expand_inputs([url])
    assert "CANARY" not in str(error.value) and "\n" not in str(error.value)


def test_compressed_input_with_an_option_that_needs_json_lines(tmp_path, bucket):
    """Options that read fields take objects as they take files."""
    bucket.put("a.jsonl.gz", gzip.compress(b'{"text": "Anna sees Rome", "spans": [[0, 4, "x"]]}\n'))
    bucket.put("b.csv", b"text\nx\n")
    with pytest.raises(ConfigError, match=r"--spans-key needs JSON lines, but s3://corpora/b.csv"):
        build(["s3://corpora/b.csv"], tmp_path / "d", spans_key="spans", text_split="file")
