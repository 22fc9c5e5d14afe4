"""Fixtures for the tests of data."""

from tests.support.s3 import _s3_client, bucket, s3_server

__all__ = ["_s3_client", "bucket", "s3_server"]
