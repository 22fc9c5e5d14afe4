//! Which names an index may hold, and which objects are ours. Pure.

use strata_io::is_plain;

/// Whether `path` leads to an object inside the checkpoint: plain parts, none of them a drive or a scheme.
pub fn is_inside(path: &str) -> bool {
    path.split('/').all(|part| is_plain(part) && !part.ends_with(':'))
}

/// Name of the `k`-th object of items that `rank` writes.
pub(crate) fn data_object(rank: u32, k: usize, save_id: &str) -> String {
    format!("__{rank}_{k}.{save_id}.distcp")
}

/// Name of the `k`-th file of safetensors that `rank` writes.
pub(crate) fn safetensors_object(rank: u32, k: usize, save_id: &str) -> String {
    format!("model-{rank:05}-{k:05}.{save_id}.safetensors")
}

/// Whether `name` is one that our saves give to data: `__{rank}_{k}.{32 hex digits}.distcp`, which stock's have no id
/// in, or [`is_our_safetensors`].
pub fn is_our_data_object(name: &str) -> bool {
    matches(name, "__", '_', ".distcp") || is_our_safetensors(name)
}

/// Whether `name` is one that our saves give to files of safetensors: `model-{rank}-{k}.{32 hex digits}.safetensors`.
pub fn is_our_safetensors(name: &str) -> bool {
    matches(name, "model-", '-', ".safetensors")
}

/// The id of the save that wrote `name`, if it is [`is_our_data_object`].
pub(crate) fn id_of_data_object(name: &str) -> Option<&str> {
    is_our_data_object(name).then(|| name.split('.').nth(1))?
}

fn matches(name: &str, head: &str, between: char, tail: &str) -> bool {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    let is_id = |text: &str| text.len() == 32 && text.bytes().all(|b| b.is_ascii_hexdigit());
    let parts = || {
        let (place, id) = name.strip_prefix(head)?.strip_suffix(tail)?.split_once('.')?;
        let (rank, k) = place.split_once(between)?;
        Some(is_number(rank) && is_number(k) && is_id(id))
    };
    parts().unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_inside_the_checkpoint_has_plain_parts() {
        for path in ["__0_0.distcp", "data/x.distcp", "..x", "a..b", "a/b:c"] {
            assert!(is_inside(path), "{path}");
        }
        let outside =
            ["", "/x", "..", "../x", "../step-1/x", "a/../b", "a//b", "./a", "a\\b", "c:/x", "s3://b/x", "a\0"];
        for path in outside {
            assert!(!is_inside(path), "{path}");
        }
    }

    #[test]
    fn our_objects_are_told_from_those_of_others() {
        let id = "0123456789abcdef0123456789abcdef";
        assert!(is_our_data_object(&data_object(12, 3, id)) && !is_our_safetensors(&data_object(12, 3, id)));
        assert!(is_our_data_object(&safetensors_object(0, 3, id)) && is_our_safetensors(&safetensors_object(0, 3, id)));
        let foreign = [
            "__0_0.distcp".into(),
            format!("__0_0.{id}"),
            format!("__0_0.{id}0.distcp"),
            format!("__x_0.{id}.distcp"),
            "model-00001-of-00002.safetensors".into(),
            format!("model-00001.{id}.safetensors"),
        ];
        for name in foreign {
            assert!(!is_our_data_object(&name), "{name}");
        }
    }
}
