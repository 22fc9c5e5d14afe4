"""What every test gets: no network, no credentials of the person who runs it, one thread a process."""

import os

# Set at import, before a test module imports torch or starts a process.
os.environ.update(
    AWS_EC2_METADATA_DISABLED="true",
    AWS_CONFIG_FILE=os.devnull,
    AWS_SHARED_CREDENTIALS_FILE=os.devnull,
    # Ranks are processes here: more threads than cores would only make them wait for each other.
    OMP_NUM_THREADS="1",
)
for name in (
    "AWS_PROFILE",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AWS_SESSION_TOKEN",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
):
    os.environ.pop(name, None)
