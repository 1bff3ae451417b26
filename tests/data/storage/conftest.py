"""No test waits between attempts; buckets are those of a moto server on the loopback."""

import moto.server
import pyarrow.fs
import pytest

from data_utils.storage import objects


@pytest.fixture(autouse=True)
def no_waits(monkeypatch):
    monkeypatch.setattr(objects, "RETRY_POLICY", objects.RetryPolicy(first_wait=0))


@pytest.fixture(autouse=True)
def credentials(monkeypatch):
    for name, value in {
        "AWS_ACCESS_KEY_ID": "CANARY-ID",
        "AWS_SECRET_ACCESS_KEY": "CANARY-SECRET",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="session")
def moto_port():
    server = moto.server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield server.get_host_and_port()[1]
    server.stop()


class Bucket:
    """A bucket that a test fills."""

    def __init__(self, port):
        self.name, self.address = "corpora", ("127.0.0.1", port)
        self.system = pyarrow.fs.S3FileSystem(
            endpoint_override=f"http://127.0.0.1:{port}",
            allow_bucket_creation=True,
            allow_bucket_deletion=True,
        )
        self.system.create_dir(self.name)

    def put(self, key, content):
        with self.system.open_output_stream(f"{self.name}/{key}", compression=None) as file:
            file.write(content)

    def put_all(self, files, folder):
        for name, content in files.items():
            self.put(f"{folder}/{name}", content)
        return [f"s3://{self.name}/{folder}/{name}" for name in files]

    def get(self, key):
        return self.system.open_input_file(f"{self.name}/{key}").read()

    def keys(self):
        selector = pyarrow.fs.FileSelector(self.name, recursive=True)
        return sorted(
            info.path.partition("/")[2] for info in self.system.get_file_info(selector) if info.is_file
        )


@pytest.fixture
def bucket(moto_port, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{moto_port}")
    bucket = Bucket(moto_port)
    yield bucket
    bucket.system.delete_dir(bucket.name)
