//! Memory of GPUs, lent to us like memory of the host: copies to and from it through kept, page-locked buffers, and
//! copies of a whole state, wherever it lies, to memory of the host that is kept for it.
//!
//! The driver is opened when the first copy needs it ([`cuda`]): one build serves machines with and without a GPU.
//! Nothing here allocates on a device or waits for the caller's kernels; who lends device memory has waited for them.

mod copies;
mod cuda;
mod driver;
mod memory;
mod pinned;
mod shared;
#[cfg(feature = "testing")]
pub mod testing;

pub use copies::Copies;
pub use cuda::cuda;
pub use driver::{Device, Driver, Error, Result};
pub use memory::DeviceMemory;
pub use pinned::{PageLocked, PinnedBuffer};
pub use shared::{memory_file, populate};
