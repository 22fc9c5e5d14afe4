"""What a save did, as far as one rank knows."""

from dataclasses import dataclass, field

from torch_strata.checkpoint.store_stats import StoreStats

__all__ = ["SaveStats"]


@dataclass(frozen=True, kw_only=True)
class SaveStats:
    """What the last save did, as far as this rank knows.

    Attributes:
        save_id: Identity of the save.
        written_bytes: Bytes that this rank wrote.
        encoded_payload_bytes: Bytes of the tensors that this rank stored encoded, as ``compress`` of a manager does.
        encoded_bytes: What these take.
        staged_bytes: Bytes of tensors that this rank copied first, in an asynchronous save.
        torn: Names of what changed on this rank while it was copied, in a save of `async_save`.
        write_seconds: Time this rank needed to write them, in seconds.
        store: What the store went through for that, and for the commit where this rank committed.
        committed: Whether this rank committed (the planning rank, or any rank without collectives); the fields below
            are 0 or None elsewhere.
        number: Number of the manifest.
        objects: Objects of the checkpoint.
        items: Tensor chunks and values of the checkpoint.
        payload_bytes: Bytes of all payloads of the checkpoint.
        referred_bytes: Of these what stands in other checkpoints.
        own_bytes: Bytes of the checkpoint's own objects, which all ranks wrote together.
        model_hash: As `CheckpointMetadata.model_hash`; None without a manager.
        collected: Superseded objects removed.
        commit_seconds: Time for the commit, in seconds.
        fenced: Whether the store refuses a second writer of the same manifest.
        warnings: What the user should know.
    """

    save_id: str
    written_bytes: int = 0
    encoded_payload_bytes: int = 0
    encoded_bytes: int = 0
    staged_bytes: int = 0
    torn: tuple[str, ...] = ()
    write_seconds: float = 0.0
    store: StoreStats = field(default_factory=StoreStats)
    committed: bool = False
    number: int = 0
    objects: int = 0
    items: int = 0
    payload_bytes: int = 0
    referred_bytes: int = 0
    own_bytes: int = 0
    model_hash: str | None = None
    collected: int = 0
    commit_seconds: float = 0.0
    fenced: bool = False
    warnings: tuple[str, ...] = ()

    @property
    def encoded_ratio(self) -> float:
        """What the encoded tensors take, over what they have; 1.0 if none is encoded."""
        return self.encoded_bytes / self.encoded_payload_bytes if self.encoded_payload_bytes else 1.0
