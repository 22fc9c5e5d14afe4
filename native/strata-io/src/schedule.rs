//! How much may be in flight at once, and into how many parts an object is cut.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// One permit stands for this many bytes; tokio's semaphores count in `u32`.
const PERMIT_BYTES: u64 = 4096;

/// Memory that may be in flight, shared by everything that one process reads and writes.
#[derive(Debug, Clone)]
pub struct ByteBudget {
    permits: Arc<Semaphore>,
    total: u32,
}

impl ByteBudget {
    /// A budget of `bytes`.
    pub fn new(bytes: u64) -> Self {
        let total = bytes.div_ceil(PERMIT_BYTES).clamp(1, (Semaphore::MAX_PERMITS as u64).min(u32::MAX as u64)) as u32;
        Self { permits: Arc::new(Semaphore::new(total as usize)), total }
    }

    /// What may be in flight at all.
    pub fn total_bytes(&self) -> u64 {
        u64::from(self.total) * PERMIT_BYTES
    }

    /// Waits until `bytes` are free, and holds them until the permit is dropped.
    ///
    /// A request larger than the whole budget gets all of it, so that one huge part still moves.
    ///
    /// # Cancel safety
    /// A dropped wait takes nothing.
    pub async fn take(&self, bytes: u64) -> OwnedSemaphorePermit {
        let wanted = bytes.div_ceil(PERMIT_BYTES).min(self.total as u64) as u32;
        self.permits.clone().acquire_many_owned(wanted).await.expect("the budget is never closed")
    }
}

/// What a store allows for the parts of one object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PartLimits {
    /// Smallest size of all parts but the last, in bytes.
    pub min_bytes: u64,
    /// Largest size of a part, in bytes.
    pub max_bytes: u64,
    /// Most parts of one object.
    pub max_parts: u64,
}

impl PartLimits {
    /// S3 and what speaks like it: <https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html>.
    pub const S3: Self = Self { min_bytes: 5 << 20, max_bytes: 5 << 30, max_parts: 10_000 };

    /// Size of the parts of an object of `object_bytes`: `wanted_bytes`, moved into the limits.
    pub fn part_bytes(&self, object_bytes: u64, wanted_bytes: u64) -> u64 {
        const MIB: u64 = 1 << 20;
        let needed = object_bytes.div_ceil(self.max_parts);
        // Whole MiB, so that blocks and parts keep common boundaries; a wish that suffices stays as it is.
        let raised = if needed > wanted_bytes { needed.next_multiple_of(MIB) } else { wanted_bytes };
        raised.clamp(self.min_bytes, self.max_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_stay_within_the_limits_of_s3() {
        const MIB: u64 = 1 << 20;
        let part = |object, wanted| PartLimits::S3.part_bytes(object, wanted);
        assert_eq!(part(0, 8 * MIB), 8 * MIB);
        assert_eq!(part(100 * MIB, MIB), 5 * MIB);
        assert_eq!(part(100 * MIB, 6 << 30), 5 << 30);
        assert_eq!(part(80_000 * MIB, 8 * MIB), 8 * MIB);
        assert_eq!(part(80_000 * MIB + 1, 8 * MIB), 9 * MIB);
        assert!((5u64 << 40).div_ceil(part(5 << 40, 8 * MIB)) <= 10_000);
    }
}
