"""Google's and Azure's protocols through pyarrow: builds, cleaning, copies and pushes, and what the stores refuse."""

import gzip

import pyarrow.fs
import pytest
from support.commands import forked
from support.data import cleaning
from support.data.cloud_stores import ACCOUNT, KEY, serving_cloud
from support.data.corpora import build as build_dataset
from support.data.stored_corpora import build, corpus_files, lines, write_files

from data_utils.common.errors import DataError, UserError
from data_utils.corpus.inputs import expand_inputs
from data_utils.dataset.local_copy import local_copy

SUFFIXES = (".bin", ".idx", ".json")


@pytest.fixture(params=["gs", "az"])
def cloud(request, monkeypatch):
    monkeypatch.setattr("data_utils.storage.buckets._GCS_SECONDS", 1.0)
    with serving_cloud(request.param) as cloud:
        monkeypatch.setenv(cloud.variable, cloud.endpoint)
        yield cloud


def few_files():
    files = corpus_files(100)
    return {name: files[name] for name in ("a.jsonl", "b.jsonl.gz", "f.parquet", "g.arrow")}


TROUBLE = {"cuts": 0.2, "busy": 0.05}  # shares of the answers


# pyarrow waits longer before it asks gs:// again.
AZURE = pytest.mark.parametrize("cloud", [pytest.param("gs", marks=pytest.mark.slow), "az"], indirect=True)


@AZURE
def test_a_build_has_the_bytes_of_local_files(tmp_path, cloud, monkeypatch):
    monkeypatch.setattr("data_utils.storage.objects.RANGE_BYTES", 70_000)
    files = few_files()
    expected = build(write_files(tmp_path / "raw", files), tmp_path / "local")
    cloud.put(files, "raw/")
    cloud.set(**TROUBLE)
    assert build([cloud.url("raw/*")], tmp_path / "remote") == expected
    written = b"".join(path.read_bytes() for path in tmp_path.glob("remote*"))
    assert b"CANARY" not in written and cloud.url("raw/a.jsonl").encode() in written
    ranges = [headers.get("range") or headers.get("x-ms-range") for _, _, headers in cloud.seen()]
    for first, last in (map(int, asked.removeprefix("bytes=").split("-")) for asked in filter(None, ranges)):
        assert last - first < 70_000


@pytest.mark.slow
def test_cleaning_has_the_output_of_local_files(tmp_path, cloud):
    files = {"a.jsonl": lines("a", 30) + lines("a", 40), "b.jsonl.gz": gzip.compress(lines("b", 20))}
    write_files(tmp_path / "raw", files)
    cloud.put(files, "raw/")
    options = ["--tasks", 1, "--workers", 1, "--input"]
    expected = cleaning.cleaned(tmp_path, "local", *options, "raw/*", exact_duplicates=True)
    cloud.set(**TROUBLE)
    assert cleaning.cleaned(tmp_path, "out", *options, cloud.url("raw/*"), exact_duplicates=True) == expected
    assert len(expected) == 60


@AZURE
def test_a_dataset_is_pushed_and_copied(tmp_path, cloud):
    build_dataset(tmp_path / "d", [[1, 2, 3], list(range(100_000))], vocab_size=100_001)
    content = {suffix: (tmp_path / f"d{suffix}").read_bytes() for suffix in SUFFIXES}
    cloud.set(cuts=0.2)

    def run(command, *arguments):
        return forked("scripts/dataset.py", command, *arguments, cwd=tmp_path)

    done = run("push", "d", cloud.url("sets/"))
    assert done.returncode == 0, done.stderr
    assert cloud.objects() == {f"sets/d{suffix}": data for suffix, data in content.items()}
    copy = local_copy(cloud.url("sets/d"), tmp_path / "local")
    assert {suffix: copy.with_name(copy.name + suffix).read_bytes() for suffix in SUFFIXES} == content
    build_dataset(tmp_path / "e", [[1, 2]])
    assert run("push", "e", cloud.url("sets/d")).returncode == 2
    assert run("push", "e", cloud.url("sets/d"), "--overwrite").returncode == 0
    assert cloud.objects()["sets/d.json"] == (tmp_path / "e.json").read_bytes()
    assert run("verify", cloud.url("sets/d")).returncode == 0
    refused = run("push", "d", f"{cloud.kind}://elsewhere/d")
    assert refused.returncode == 2 and "there is no bucket elsewhere" in refused.stderr


def names(cloud, pattern):
    return [
        str(path).removeprefix(f"{cloud.kind}://corpora/") for path in expand_inputs([cloud.url(pattern)])
    ]


@AZURE
def test_names_folders_and_globs(cloud):
    cloud.put(dict.fromkeys(("a/1.jsonl", "a/2.jsonl", "a/b/3 ä.jsonl", "a/[x].jsonl", "ab.jsonl"), b"{}\n"))
    everything = ["a/1.jsonl", "a/2.jsonl", "a/[x].jsonl", "a/b/3 ä.jsonl"]
    assert names(cloud, "a/") == names(cloud, "a") == names(cloud, "a/**") == everything
    assert names(cloud, "a/[12].jsonl") == ["a/1.jsonl", "a/2.jsonl"]
    assert names(cloud, "a/[x].jsonl") == ["a/[x].jsonl"]
    assert names(cloud, "a*.jsonl") == ["ab.jsonl"]
    for nothing in ("d", "a/*.gz", "a/1"):
        with pytest.raises(DataError, match=r"names no object"):
            names(cloud, nothing)
    for nothing in ("x.jsonl", "x/", "x/*.jsonl"):
        with pytest.raises(
            DataError, match=rf"^input {cloud.kind}://elsewhere/x.*there is no bucket elsewhere"
        ):
            expand_inputs([f"{cloud.kind}://elsewhere/{nothing}"])


def test_a_replaced_object_of_equal_size_is_refused(cloud):
    cloud.put({"a.jsonl": lines("a", 100)})
    [listed] = expand_inputs([cloud.url("a.jsonl")])
    assert listed.read(0, 10) == lines("a", 100)[:10]
    cloud.put({"a.jsonl": lines("b", 100)})
    for start in (0, 10):
        with pytest.raises(DataError, match=r"a.jsonl is not what it was"):
            listed.read(start, start + 10)
    cloud.set(refusal=(404, {"gs": "notFound", "az": "BlobNotFound"}[cloud.kind]))
    with pytest.raises(DataError, match=r"a.jsonl.* (no such object|not what it was)"):
        listed.read(0, 10)


NAMED = {"gs": "GOOGLE_APPLICATION_CREDENTIALS", "az": "AZURE_STORAGE_ACCOUNT_KEY"}


@pytest.mark.parametrize(
    ("refusal", "words"),
    [
        ((403, "AuthorizationPermissionMismatch"), NAMED),
        ((401, "NoAuthenticationInformation"), NAMED),
        ((404, "ContainerNotFound"), dict.fromkeys(NAMED, "there is no bucket corpora")),
    ],
)
def test_refusals_are_one_line_that_names_what_to_set(cloud, refusal, words):
    cloud.set(refusal=refusal)
    for url in (cloud.url("a.jsonl"), cloud.url("a/*.jsonl")):
        with pytest.raises(DataError) as error:
            expand_inputs([url])
        said = str(error.value)
        assert words[cloud.kind] in said and url in said and cloud.variable in said
        assert not {"WORDS", "CANARY"} & set(said.replace("-", " ").split())
    assert len(cloud.seen()) <= 8


def test_a_name_that_google_s_store_does_not_take(monkeypatch):
    with serving_cloud("gs") as cloud:
        monkeypatch.setenv(cloud.variable, cloud.endpoint)
        cloud.set(refusal=(400, "invalid"))
        with pytest.raises(DataError, match="check the bucket and the name"):
            expand_inputs([cloud.url("a.jsonl")])
        assert len(cloud.seen()) == 1


def test_rights_that_end_amid_the_work(cloud):
    cloud.put({"a.jsonl": lines("a", 10)})
    [listed] = expand_inputs([cloud.url("a.jsonl")])
    cloud.set(refusal=(403, "AuthorizationFailure"))
    with pytest.raises(DataError, match=NAMED[cloud.kind]):
        listed.read(0, 10)


@pytest.mark.parametrize("content", ["{CANARY", None])
def test_a_wrong_file_of_google_s_key(tmp_path, monkeypatch, content):
    path = tmp_path / "key.json"
    if content:
        path.write_text(content)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(path))
    with pytest.raises(DataError, match="GOOGLE_APPLICATION_CREDENTIALS") as error:
        expand_inputs(["gs://corpora/a.jsonl"])
    assert "CANARY" not in str(error.value)


@pytest.fixture
def azure(monkeypatch):
    with serving_cloud("az") as cloud:
        cloud.put({"a.jsonl": b"{}\n"})
        yield cloud


def connect(monkeypatch, azure, **others):
    """Set the connection string. Args: others: name -> another value; None = without it."""
    values = dict(entry.split("=", 1) for entry in azure.endpoint.split(";")) | others
    text = ";".join(f"{name}={value}" for name, value in values.items() if value is not None)
    monkeypatch.setenv(azure.variable, text)


def test_ways_to_name_an_account_of_azure(monkeypatch, azure):
    def found(url="az://corpora/a.jsonl"):
        return [str(path) for path in expand_inputs([url])] == [url]

    connect(monkeypatch, azure)
    assert found() and found(f"abfs://corpora@{ACCOUNT}.dfs.core.windows.net/a.jsonl")
    connect(monkeypatch, azure, AccountKey=None)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", KEY)
    assert found()
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_KEY")
    for token in ("sig=CANARY-SIGNATURE", "?sig=CANARY-SIGNATURE"):
        connect(monkeypatch, azure, AccountKey=None, SharedAccessSignature=token)
        assert found()
    connect(monkeypatch, azure, AccountKey="d3Jvbmc=")
    with pytest.raises(DataError, match="AZURE_STORAGE_ACCOUNT_KEY"):
        found()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"AccountName": None}, "no AccountName"),
        ({"AccountKey": "CANARY not base64"}, "AccountKey"),
        ({"BlobEndpoint": "ftp://127.0.0.1/x?CANARY"}, "BlobEndpoint"),
        ({"BlobEndpoint": "http://[CANARY"}, "BlobEndpoint"),
    ],
)
def test_a_connection_string_of_another_form_is_one_line(monkeypatch, azure, change, words):
    connect(monkeypatch, azure, **change)
    with pytest.raises(UserError) as error:
        expand_inputs(["az://corpora/a.jsonl"])
    assert words in str(error.value) and azure.variable in str(error.value)
    assert "CANARY" not in str(error.value) and not azure.seen()


@pytest.mark.parametrize("host", ["account.example.org", "account.windows.net", ".dfs.core.windows.net"])
def test_a_key_goes_to_no_host_of_a_url(host):
    with pytest.raises(UserError, match="no host of Azure"):
        expand_inputs([f"abfs://corpora@{host}/a.jsonl"])


def test_clouds_of_azure(monkeypatch):
    """Hosts follow the URL or EndpointSuffix."""
    asked = []
    monkeypatch.delenv("AZURE_STORAGE_CONNECTION_STRING", raising=False)
    monkeypatch.setattr(pyarrow.fs, "AzureFileSystem", lambda **options: asked.append(options))
    for url, connection in (
        ("abfs://c@account.dfs.core.chinacloudapi.cn/a.jsonl", ""),
        ("az://c/a.jsonl", "AccountName=account;EndpointSuffix=core.chinacloudapi.cn"),
        ("az://c/a.jsonl", "AccountName=account;BlobEndpoint=https://account.blob.core.chinacloudapi.cn/"),
        # With a shared access signature Azure's portal writes no AccountName.
        (
            "az://c/a.jsonl",
            "BlobEndpoint=https://account.blob.core.chinacloudapi.cn/;SharedAccessSignature=sv=1&sig=x%3D",
        ),
    ):
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", connection)
        with pytest.raises(AttributeError):  # of None, which is no file system
            expand_inputs([url])
        options = asked[-1]
        assert options["account_name"] == "account"
        hosts = options["blob_storage_authority"], options["dfs_storage_authority"]
        assert hosts == (".blob.core.chinacloudapi.cn", ".dfs.core.chinacloudapi.cn")


@pytest.mark.parametrize(
    "endpoint",
    ["ftp://host", "http://", "http://[x", "http://user:CANARY@host", "user:CANARY@host", "http://host/x"],
)
def test_an_emulator_of_another_form_is_one_line(monkeypatch, endpoint):
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", endpoint)
    with pytest.raises(UserError, match="STORAGE_EMULATOR_HOST") as error:
        expand_inputs(["gs://corpora/a.jsonl"])
    assert "CANARY" not in str(error.value)
