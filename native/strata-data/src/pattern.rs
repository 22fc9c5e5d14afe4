//! Patterns of names: which names match, and where they can lie. Pure.

use globset::{GlobBuilder, GlobMatcher};

use crate::{Error, Result};

/// A glob, with ranges in braces.
#[derive(Debug, Clone)]
pub(crate) struct Pattern {
    /// All that matches lies below it: empty, or ending in a slash.
    pub folder: String,
    /// Whether what matches may lie in folders of `folder`.
    pub is_deep: bool,
    /// The only name that matches, where it is no glob.
    pub literal: Option<String>,
    matcher: GlobMatcher,
}

impl Pattern {
    /// `*` and `?` are within a folder, `**` over folders; `{a,b}`, `[0-9]`; `{000..127}` and `{a..f}` are each of the
    /// range, with zeros in front if one of its ends has them.
    ///
    /// # Errors
    /// [`Error::Config`] for what is no pattern.
    pub fn new(pattern: &str) -> Result<Self> {
        let refused = |detail: String| Error::Config(format!("the pattern {pattern:?}: {detail}"));
        let glob = GlobBuilder::new(&expanded(pattern).map_err(refused)?).literal_separator(true).build();
        let matcher = glob.map_err(|error| refused(error.to_string()))?.compile_matcher();
        let literal = &pattern[..pattern.find(['*', '?', '[', '{', '\\']).unwrap_or(pattern.len())];
        let (folder, rest) = pattern.split_at(literal.rfind('/').map_or(0, |slash| slash + 1));
        let is_deep = rest.contains('/') || rest.contains("**");
        let only = (literal == pattern && !rest.is_empty()).then(|| pattern.to_owned());
        Ok(Self { folder: folder.to_owned(), is_deep, literal: only, matcher })
    }

    /// Whether the whole `name` matches.
    pub fn matches(&self, name: &str) -> bool {
        self.matcher.is_match(name)
    }
}

/// `pattern` as a glob without ranges.
fn expanded(pattern: &str) -> Result<String, String> {
    let (mut glob, mut rest) = (String::with_capacity(pattern.len()), pattern);
    while let Some(at) = rest.find(['{', '\\']) {
        let (before, special) = rest.split_at(at);
        glob.push_str(before);
        let braced = special.find('}').filter(|_| special.starts_with('{')).map(|end| &special[1..end]);
        let range = braced.filter(|inner| !inner.contains(['{', ','])).and_then(|inner| inner.split_once(".."));
        if let (Some(inner), Some((first, last))) = (braced, range) {
            glob.push_str(&alternatives(first, last)?);
            rest = &special[inner.len() + 2..];
        } else {
            // A brace as it is, or what is escaped.
            let kept = special.chars().take(if special.starts_with('{') { 1 } else { 2 }).map(char::len_utf8).sum();
            glob.push_str(&special[..kept]);
            rest = &special[kept..];
        }
    }
    Ok(glob + rest)
}

/// A glob of what is from `first` to `last`, both among it.
fn alternatives(first: &str, last: &str) -> Result<String, String> {
    if let ([a], [b]) = (first.as_bytes(), last.as_bytes())
        && (a.is_ascii_lowercase() && b.is_ascii_lowercase() || a.is_ascii_uppercase() && b.is_ascii_uppercase())
    {
        return Ok(format!("[{}-{}]", char::from(*a.min(b)), char::from(*a.max(b))));
    }
    let number = |text: &str| {
        let is_number = !text.is_empty() && text.len() <= 18 && text.bytes().all(|byte| byte.is_ascii_digit());
        // Eighteen digits fit.
        is_number.then(|| text.parse::<u64>().expect("digits"))
    };
    let (Some(a), Some(b)) = (number(first), number(last)) else {
        return Err(format!(
            "{{{first}..{last}}} is no range: expected two numbers of at most 18 digits, or two letters"
        ));
    };
    let (low, high) = (a.min(b), a.max(b));
    let has_zeros = |text: &str| text.len() > 1 && text.starts_with('0');
    let mut found = Vec::new();
    if has_zeros(first) || has_zeros(last) {
        let width = first.len().max(last.len());
        found = classes(&format!("{low:0width$}"), &format!("{high:0width$}"));
    } else {
        for width in low.to_string().len()..=high.to_string().len() {
            let least = if width == 1 { 0 } else { 10u64.pow(width as u32 - 1) };
            let most = 10u64.pow(width as u32) - 1;
            found.extend(classes(&low.max(least).to_string(), &high.min(most).to_string()));
        }
    }
    Ok(if found.len() == 1 { found.remove(0) } else { format!("{{{}}}", found.join(",")) })
}

/// Globs of the numbers from `low` to `high`, of the same number of digits: few, however many numbers there are.
fn classes(low: &str, high: &str) -> Vec<String> {
    let Some(width) = low.len().checked_sub(1) else { return vec![String::new()] };
    if low.bytes().all(|digit| digit == b'0') && high.bytes().all(|digit| digit == b'9') {
        return vec!["[0-9]".repeat(low.len())];
    }
    let ((a, low), (b, high)) = (low.split_at(1), high.split_at(1));
    let behind = |digit: &str, rest: Vec<String>| rest.into_iter().map(|rest| format!("{digit}{rest}")).collect();
    if a == b {
        return behind(a, classes(low, high));
    }
    let mut found: Vec<String> = behind(a, classes(low, &"9".repeat(width)));
    let digit = |text: &str| text.as_bytes()[0];
    if digit(a) + 1 < digit(b) {
        found.push(format!("[{}-{}]{}", char::from(digit(a) + 1), char::from(digit(b) - 1), "[0-9]".repeat(width)));
    }
    found.extend(behind(b, classes(&"0".repeat(width), high)));
    found
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn pattern(pattern: &str) -> Pattern {
        Pattern::new(pattern).expect("a pattern")
    }

    fn matching<'a>(of: &str, names: &[&'a str]) -> Vec<&'a str> {
        names.iter().copied().filter(|name| pattern(of).matches(name)).collect()
    }

    #[test]
    fn ranges_have_zeros_where_one_end_has_them() {
        let names = ["s-0", "s-7", "s-8", "s-12", "s-13", "s-07", "s-08", "s-012", "s-008", "s-a"];
        assert_eq!(matching("s-{8..12}", &names), ["s-8", "s-12"]);
        assert_eq!(matching("s-{12..8}", &names), ["s-8", "s-12"]);
        assert_eq!(matching("s-{08..12}", &names), ["s-12", "s-08"]);
        assert_eq!(matching("s-{000..12}", &names), ["s-012", "s-008"]);
        assert_eq!(matching("s-{0..0}", &names), ["s-0"]);
        assert_eq!(matching("s-{a..c}", &names), ["s-a"]);
    }

    #[test]
    fn ranges_stand_among_other_signs() {
        let names = ["a/x01.tar", "a/x03.tar", "b/x02.tar", "b/y.tar", "b/{1..2}", "b/1..2"];
        assert_eq!(matching("*/x{01..02}.tar", &names), ["a/x01.tar", "b/x02.tar"]);
        assert_eq!(matching("{a..b}/{x{02..09},y}.tar", &names), ["a/x03.tar", "b/x02.tar", "b/y.tar"]);
        assert_eq!(matching("b/\\{1..2\\}", &names), ["b/{1..2}"]);
        assert_eq!(matching("b/{1..2,y.tar}", &names), ["b/y.tar", "b/1..2"]);
        assert_eq!(matching("{a,b}/x0[12].tar", &names), ["a/x01.tar", "b/x02.tar"]);
    }

    #[test]
    fn what_is_no_range_is_refused() {
        for wrong in ["{1..}", "{..3}", "{a..3}", "{a..C}", "{0..10..2}", "{-1..3}", "{0..1000000000000000000}"] {
            let error = Pattern::new(wrong).expect_err(wrong).to_string();
            assert!(error.contains("is no range"), "{wrong}: {error}");
        }
        assert!(Pattern::new("[a").is_err());
    }

    #[test]
    fn only_the_folder_that_is_named_is_looked_into() {
        let place = |of: &str| {
            let Pattern { folder, is_deep, .. } = pattern(of);
            (folder, is_deep)
        };
        let expected = |folder: &str, is_deep| (folder.to_owned(), is_deep);
        assert_eq!(place("*.tar"), expected("", false));
        assert_eq!(place("a/b/*.tar"), expected("a/b/", false));
        assert_eq!(place("a/b/c.tar"), expected("a/b/", false));
        assert_eq!(place("a/b-{00..99}/c/*.tar"), expected("a/", true));
        assert_eq!(place("a/**"), expected("a/", true));
        assert_eq!(place("a/\\*/b"), expected("a/", true));
        assert_eq!(place("a/{b/c,d}"), expected("a/", true));
    }

    proptest! {
        #[test]
        fn a_range_is_each_number_and_no_other(
            low in 0u64..3000,
            span in 0u64..3000,
            width in 1usize..6,
            number in 0u64..7000,
            wide in 1usize..6,
        ) {
            let high = low + span;
            let name = format!("{number:0wide$}");
            let (first, last) = (format!("{low:0width$}"), format!("{high:0width$}"));
            let has_zeros = [&first, &last].iter().any(|end| end.len() > 1 && end.starts_with('0'));
            let expected = if has_zeros { format!("{number:0w$}", w = last.len()) } else { number.to_string() };
            let is_in = (low..=high).contains(&number) && name == expected;
            prop_assert_eq!(pattern(&format!("{{{first}..{last}}}")).matches(&name), is_in);
        }
    }
}
