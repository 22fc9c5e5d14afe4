//! Other checkpoints under the same run root, to objects of which a manifest refers: they lie beside this one.

use std::sync::Arc;

use strata_io::{Error as IoError, Store};

use crate::item::Object;
use crate::manifest::Manifest;
use crate::{Error, Result};

/// The places that a manifest's references name, in their order.
#[derive(Debug)]
pub(crate) struct Siblings(Vec<Arc<dyn Store>>);

impl Siblings {
    /// Those of `manifest`, which was read from `store`. Looks at nothing.
    ///
    /// # Errors
    /// [`Error::Io`] if nothing can lie beside `store`.
    pub fn of(store: &dyn Store, manifest: &Manifest) -> Result<Self> {
        let siblings = manifest.references.iter().map(|(checkpoint_id, _)| store.sibling(checkpoint_id));
        Ok(Self(siblings.collect::<strata_io::Result<_>>()?))
    }

    /// Where `object` is, under its name: in one of these or in the checkpoint itself.
    pub fn place<'a>(&'a self, own: &'a dyn Store, object: &Object) -> &'a dyn Store {
        object.reference.map_or(own, |reference| &*self.0[reference as usize])
    }
}

/// The error of a read of `object`; one that is missing elsewhere says who refers to it.
pub(crate) fn explained(error: IoError, own: &str, object: &Object) -> Error {
    match error {
        IoError::NotFound { object: url, detail } if object.reference.is_some() => {
            IoError::NotFound { object: url, detail: format!("{detail}: {own} refers to it") }.into()
        }
        error => error.into(),
    }
}
