//! Everything that can go wrong between us and a store.

/// Result of a store operation.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A failed store operation. `object` is the full URL or path of what was touched.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    /// The URL, an option or a limit makes no sense.
    #[error("{0}")]
    Config(String),
    /// Nothing is stored under that name, or the bucket or directory does not exist.
    #[error("{object} does not exist{detail}")]
    NotFound {
        /// What was asked for.
        object: String,
        /// What else is known, starting with `": "`, or empty.
        detail: String,
    },
    /// The bucket or container itself does not exist: nothing can be there, and nothing can be written.
    #[error("{object} does not exist: the bucket does not exist")]
    NoBucket {
        /// What was asked for.
        object: String,
    },
    /// A multipart upload that we had begun is no longer known to the store.
    #[error("the upload of {object} was ended by somebody else, such as a save that has committed there meanwhile")]
    UploadEnded {
        /// What was being written.
        object: String,
    },
    /// The store refuses us: credentials or permissions.
    #[error("access to {object} is denied: {detail}")]
    PermissionDenied {
        /// What was asked for.
        object: String,
        /// The store's own words.
        detail: String,
    },
    /// A create-only write met an object that is already there.
    #[error("{object} already exists")]
    AlreadyExists {
        /// What was to be created.
        object: String,
    },
    /// The store answered with other bytes than expected: short, long, or refused by its own checksum.
    #[error("{object}: expected {expected}, found {found}")]
    Mismatch {
        /// What was read or written.
        object: String,
        /// What should have been there.
        expected: String,
        /// What was there.
        found: String,
    },
    /// Every try failed, or the deadline passed.
    #[error("{operation} {object} failed after {tries} tries in {elapsed_s:.1} s: {detail}")]
    Exhausted {
        /// What was tried, a verb: `write`, `read`, `list`.
        operation: &'static str,
        /// The object.
        object: String,
        /// Number of tries.
        tries: u32,
        /// Seconds from the first try to the last failure.
        elapsed_s: f64,
        /// The last failure.
        detail: String,
    },
    /// The operating system or the store said no in a way that a second try will not change.
    #[error("{operation} {object}: {detail}")]
    Io {
        /// What was tried, a verb.
        operation: &'static str,
        /// The object.
        object: String,
        /// `errno` where there is one.
        errno: Option<i32>,
        /// The system's own words.
        detail: String,
    },
}

/// An error with its causes, each said once.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let said = error.to_string();
        if !text.contains(&said) {
            text = format!("{text}: {said}");
        }
        cause = error.source();
    }
    text
}
