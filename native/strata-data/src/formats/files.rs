//! Files of which each is a sample with one field: `a/b.c.jpg` is the field `c.jpg` of the sample `a/b`. Pure.

use super::{Encoding, Field, Fields, key_and_field};
use crate::bounds::Bounds;

/// Name of the field where the file's name has no room for one.
pub const FIELD: &str = "data";

/// All `size` bytes are the sample.
pub fn bounds(size: u64) -> Bounds {
    Bounds::Even { first: 0, stride: size, size, count: 1 }
}

/// The field of the file `name`, whose bytes these are.
pub fn fields(name: &str, bytes: &[u8]) -> Fields {
    let (key, field) = key_and_field(name).unwrap_or((name, FIELD));
    let data = 0..bytes.len() as u64;
    let field = Field { name: field.to_lowercase(), data, encoding: Encoding::ByName };
    Fields { key: key.to_owned(), fields: vec![field] }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_key_and_field() {
        let of = |name: &str| {
            let Fields { key, mut fields } = fields(name, b"bytes");
            let field = fields.remove(0);
            assert_eq!(field.data, 0..5);
            (key, field.name)
        };
        let pair = |key: &str, field: &str| (key.to_owned(), field.to_owned());
        assert_eq!(of("train.d/cat/1.SEG.png"), pair("train.d/cat/1", "seg.png"));
        assert_eq!(of("1.txt"), pair("1", "txt"));
        assert_eq!(of("a.b/none"), pair("a.b/none", "data"));
        assert_eq!(of("a/.hidden"), pair("a/.hidden", "data"));
        assert_eq!(of("a/end."), pair("a/end.", "data"));
    }
}
