//! The objects whose names match a pattern.

use globset::GlobBuilder;
use strata_io::{ObjectInfo, Store};

use crate::{Error, Result};

/// The objects below `store` whose names match `pattern`, sorted; there may be none.
pub(crate) async fn matching(store: &dyn Store, pattern: &str) -> Result<Vec<ObjectInfo>> {
    let glob = GlobBuilder::new(pattern).literal_separator(true).build();
    let glob = glob.map_err(|error| Error::Config(format!("the pattern {pattern:?}: {error}")))?.compile_matcher();
    let is_deep = pattern.contains('/') || pattern.contains("**");
    let mut found = if is_deep { store.list_below("").await? } else { store.list("").await? };
    found.retain(|info| glob.is_match(&info.name));
    Ok(found)
}
