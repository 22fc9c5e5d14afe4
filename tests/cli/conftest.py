"""Fixtures for the tests of the command."""

from tests.support.s3 import _s3_client, bucket, s3_server
from tests.support.web import web

__all__ = ["_s3_client", "bucket", "s3_server", "web"]
