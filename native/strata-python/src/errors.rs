//! Rust's errors as the classes of torch_strata.errors.

use pyo3::PyErr;

mod classes {
    #![allow(missing_docs)]
    use pyo3::import_exception;
    import_exception!(torch_strata.errors, ConfigError);
    import_exception!(torch_strata.errors, StorageError);
    import_exception!(torch_strata.errors, ObjectNotFoundError);
    import_exception!(torch_strata.errors, StoragePermissionError);
    import_exception!(torch_strata.errors, PreconditionError);
    import_exception!(torch_strata.errors, CorruptionError);
    import_exception!(torch_strata.errors, ChecksumError);
    import_exception!(torch_strata.errors, ManifestError);
    import_exception!(torch_strata.errors, CheckpointError);
    import_exception!(torch_strata.errors, CheckpointExistsError);
    import_exception!(torch_strata.errors, CheckpointNotFoundError);
    import_exception!(torch_strata.errors, StaleGenerationError);
    import_exception!(torch_strata.errors, ForkedProcessError);
}
use classes::*;

/// An error of one of the crates.
pub(crate) trait Raised {
    /// Its exception.
    fn raised(self) -> PyErr;
}

impl Raised for strata_checkpoint::Error {
    fn raised(self) -> PyErr {
        to_py(self)
    }
}

impl Raised for strata_io::Error {
    fn raised(self) -> PyErr {
        store_error(self)
    }
}

impl Raised for strata_data::Error {
    fn raised(self) -> PyErr {
        use strata_data::Error;
        let message = self.to_string();
        match self {
            Error::Io(error) => store_error(error),
            Error::Config(_) => ConfigError::new_err(message),
            Error::File { .. } => StorageError::new_err(message),
            Error::Damaged { .. } => CorruptionError::new_err(message),
            Error::NotFound { .. } => ObjectNotFoundError::new_err(message),
        }
    }
}

/// The exception for what a child has of a process that it was forked from.
pub(crate) fn forked(what: &str) -> PyErr {
    ForkedProcessError::new_err(format!("{what} of another process: this one was forked from it; make its own here"))
}

/// The exception for a checkpoint's or a store's error.
pub(crate) fn to_py(error: strata_checkpoint::Error) -> PyErr {
    use strata_checkpoint::Error;
    let message = error.to_string();
    match error {
        Error::Io(error) => store_error(error),
        Error::Checksum { .. } => ChecksumError::new_err(message),
        Error::Manifest { .. } | Error::Unsupported { .. } => ManifestError::new_err(message),
        Error::NotFound { .. } => CheckpointNotFoundError::new_err(message),
        Error::Exists { .. } => CheckpointExistsError::new_err(message),
        Error::Superseded { .. } => PreconditionError::new_err(message),
        Error::StaleGeneration { .. } => StaleGenerationError::new_err(message),
        Error::Plan(_) | Error::Device(_) => CheckpointError::new_err(message),
    }
}

fn store_error(error: strata_io::Error) -> PyErr {
    use strata_io::Error;
    let message = error.to_string();
    match error {
        Error::Config(_) => ConfigError::new_err(message),
        Error::NotFound { .. } | Error::NoBucket { .. } => ObjectNotFoundError::new_err(message),
        Error::PermissionDenied { .. } => StoragePermissionError::new_err(message),
        Error::AlreadyExists { .. } | Error::UploadEnded { .. } => PreconditionError::new_err(message),
        Error::Mismatch { .. } => CorruptionError::new_err(message),
        Error::Exhausted { .. } | Error::Io { .. } => StorageError::new_err(message),
    }
}
