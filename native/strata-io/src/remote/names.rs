//! Names in a store and keys in a bucket.

use object_store::path::Path;

use crate::{Error, Result};

/// Key of `name` below `root` (no slash at either end, or empty).
///
/// # Errors
/// [`Error::Config`] if the name is empty, leaves the root, or has a control character or an empty segment.
pub(crate) fn key(root: &str, name: &str) -> Result<Path> {
    if name.is_empty() {
        return Err(Error::Config("an object's name is empty".to_owned()));
    }
    folder_key(root, name)
}

/// Key of the folder `prefix` (`""`, or ending in `/`) below `root`, without a slash at the end.
pub(crate) fn folder_key(root: &str, prefix: &str) -> Result<Path> {
    let relative = prefix.strip_suffix('/').unwrap_or(prefix);
    let full = match (root, relative) {
        (root, "") => root.to_owned(),
        ("", relative) => relative.to_owned(),
        (root, relative) => format!("{root}/{relative}"),
    };
    if relative.starts_with('/') {
        return Err(Error::Config(format!("the name {prefix:?} starts with a slash")));
    }
    Path::parse(full).map_err(|error| Error::Config(format!("the name {prefix:?} is not usable: {error}")))
}

/// Name of `key` relative to `root`; `None` for the root itself, or what is not below it.
pub(crate) fn name<'a>(root: &str, key: &'a Path) -> Option<&'a str> {
    let key = key.as_ref();
    let name = if root.is_empty() { key } else { key.strip_prefix(root)?.strip_prefix('/')? };
    (!name.is_empty()).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_come_back_from_their_keys_unchanged() {
        for root in ["", "run", "a/b"] {
            for odd in ["x", "__0_0.distcp", "with space", "a%20b", "ü~#?[]{}", ".metadata", "d/e+f=g&h"] {
                assert_eq!(name(root, &key(root, odd).unwrap()), Some(odd), "{root:?} {odd:?}");
            }
        }
    }

    #[test]
    fn names_that_leave_the_root_are_refused() {
        for bad in ["", "../x", "a/../b", ".", "/x", "a//b", "a\nb"] {
            assert!(matches!(key("run", bad), Err(Error::Config(_))), "{bad:?}");
        }
    }

    #[test]
    fn keys_beside_the_root_have_no_name() {
        for other in ["runs/x", "run", "other"] {
            assert_eq!(name("run", &Path::parse(other).unwrap()), None, "{other:?}");
        }
    }
}
