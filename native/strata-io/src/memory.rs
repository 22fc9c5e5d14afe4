//! Stores in this process's memory, for tests: `memory://name/prefix`, shared by name.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex};

use object_store::memory::InMemory;

static BY_NAME: LazyLock<Mutex<HashMap<String, Arc<InMemory>>>> = LazyLock::new(Mutex::default);

/// The store called `name`, made when first asked for; it lives as long as the process.
pub(crate) fn named(name: &str) -> Arc<InMemory> {
    let mut stores = BY_NAME.lock().expect("no panic while held");
    stores.entry(name.to_owned()).or_default().clone()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_name_is_one_store() {
        assert!(Arc::ptr_eq(&named("one-name"), &named("one-name")));
        assert!(!Arc::ptr_eq(&named("one-name"), &named("another")));
    }
}
