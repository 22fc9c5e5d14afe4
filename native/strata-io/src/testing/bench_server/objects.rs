//! What the server stores: names, lengths, and bytes where they are kept.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex};

use super::wire::Reply;

/// What is served for bytes that were not kept, over and over.
static PATTERN: LazyLock<Vec<u8>> = LazyLock::new(|| (0..4 << 20).map(|i: u32| (i % 251) as u8).collect());

const PAGE_KEYS: usize = 1000;

type Free = Arc<Mutex<Vec<Vec<u8>>>>;
type Metadata = Vec<(String, String)>;

/// The bytes of an object or part.
#[derive(Debug, Clone)]
pub(super) enum Body {
    /// Only their number is known.
    Pattern(u64),
    Kept(Arc<Memory>),
    Parts(Vec<Body>),
}

/// Memory that is used again.
#[derive(Debug)]
pub(super) struct Memory {
    bytes: Vec<u8>,
    free: Free,
}

impl Drop for Memory {
    fn drop(&mut self) {
        let bytes = std::mem::take(&mut self.bytes);
        self.free.lock().expect("no panic while held").push(bytes);
    }
}

impl Body {
    fn len(&self) -> u64 {
        match self {
            Self::Pattern(bytes) => *bytes,
            Self::Kept(memory) => memory.bytes.len() as u64,
            Self::Parts(parts) => parts.iter().map(Self::len).sum(),
        }
    }

    /// Writes `range`, which lies within.
    pub(super) fn write(&self, mut range: Range<u64>, to: &mut impl Write) -> io::Result<()> {
        match self {
            Self::Kept(memory) => to.write_all(&memory.bytes[range.start as usize..range.end as usize]),
            Self::Pattern(_) => {
                while range.start < range.end {
                    let at = (range.start % PATTERN.len() as u64) as usize;
                    let fitting = (PATTERN.len() - at).min((range.end - range.start) as usize);
                    to.write_all(&PATTERN[at..at + fitting])?;
                    range.start += fitting as u64;
                }
                Ok(())
            }
            Self::Parts(parts) => {
                let mut begin = 0;
                for part in parts {
                    let end = begin + part.len();
                    let own = range.start.max(begin)..range.end.min(end);
                    if own.start < own.end {
                        part.write(own.start - begin..own.end - begin, to)?;
                    }
                    begin = end;
                }
                Ok(())
            }
        }
    }

    pub(super) fn to_vec(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        self.write(0..self.len(), &mut bytes).expect("a vector takes everything");
        bytes
    }
}

#[derive(Debug, Clone)]
struct Object {
    body: Body,
    e_tag: String,
    metadata: Metadata,
}

#[derive(Debug, Default)]
struct Upload {
    path: String,
    metadata: Metadata,
    parts: BTreeMap<u32, Body>,
}

/// Everything that is stored, by `bucket/key`.
#[derive(Debug)]
pub(super) struct Objects {
    keep: bool,
    free: Free,
    next: AtomicU64,
    objects: Mutex<BTreeMap<String, Object>>,
    uploads: Mutex<BTreeMap<String, Upload>>,
}

impl Objects {
    pub(super) fn new(keep: bool) -> Self {
        let (objects, uploads) = (Mutex::default(), Mutex::default());
        Self { keep, free: Free::default(), next: AtomicU64::new(1), objects, uploads }
    }

    pub(super) fn keeps(&self) -> bool {
        self.keep
    }

    /// `length` bytes to be overwritten, warm ones where there are any.
    pub(super) fn memory(&self, length: usize) -> Vec<u8> {
        let mut free = self.free.lock().expect("no panic while held");
        let fitting = free.iter().position(|bytes| bytes.capacity() >= length && bytes.capacity() <= 2 * length + 4096);
        let mut bytes = fitting.map(|index| free.swap_remove(index)).unwrap_or_default();
        drop(free);
        bytes.resize(length, 0);
        bytes
    }

    pub(super) fn kept(&self, bytes: Vec<u8>) -> Body {
        Body::Kept(Arc::new(Memory { bytes, free: self.free.clone() }))
    }

    pub(super) fn pending_uploads(&self) -> Vec<String> {
        self.uploads.lock().expect("no panic while held").keys().cloned().collect()
    }

    fn e_tag(&self) -> String {
        format!("\"{:032x}\"", self.next.fetch_add(1, Ordering::Relaxed))
    }

    pub(super) fn put(&self, path: &str, body: Body, metadata: Metadata, create: bool) -> Reply {
        let mut objects = self.objects.lock().expect("no panic while held");
        if create && objects.contains_key(path) {
            return Reply::error(412, "PreconditionFailed");
        }
        let e_tag = self.e_tag();
        objects.insert(path.to_owned(), Object { body, e_tag: e_tag.clone(), metadata });
        Reply { status: 200, headers: vec![("etag".to_owned(), e_tag)], ..Reply::default() }
    }

    pub(super) fn copy(&self, from: &str, to: &str) -> Reply {
        let mut objects = self.objects.lock().expect("no panic while held");
        let Some(object) = objects.get(from).cloned() else {
            return Reply::error(404, "NoSuchKey");
        };
        let e_tag = self.e_tag();
        objects.insert(to.to_owned(), Object { e_tag: e_tag.clone(), ..object });
        let facts = format!("<ETag>{}</ETag><LastModified>2026-01-01T00:00:00.000Z</LastModified>", escaped(&e_tag));
        Reply::xml(200, format!("<CopyObjectResult>{facts}</CopyObjectResult>"))
    }

    pub(super) fn begin(&self, path: &str, metadata: Metadata) -> Reply {
        let id = format!("upload-{}", self.next.fetch_add(1, Ordering::Relaxed));
        let upload = Upload { path: path.to_owned(), metadata, parts: BTreeMap::new() };
        self.uploads.lock().expect("no panic while held").insert(id.clone(), upload);
        let (bucket, key) = path.split_once('/').unwrap_or((path, ""));
        let place = format!("<Bucket>{bucket}</Bucket><Key>{}</Key>", escaped(key));
        let id = format!("<UploadId>{id}</UploadId>");
        Reply::xml(200, format!("<InitiateMultipartUploadResult>{place}{id}</InitiateMultipartUploadResult>"))
    }

    pub(super) fn put_part(&self, id: &str, number: u32, body: Body) -> Reply {
        let mut uploads = self.uploads.lock().expect("no panic while held");
        let Some(upload) = uploads.get_mut(id) else {
            return Reply::error(404, "NoSuchUpload");
        };
        upload.parts.insert(number, body);
        Reply { status: 200, headers: vec![("etag".to_owned(), self.e_tag())], ..Reply::default() }
    }

    pub(super) fn complete(&self, path: &str, id: &str) -> Reply {
        let Some(upload) = self.uploads.lock().expect("no panic while held").remove(id) else {
            return Reply::error(404, "NoSuchUpload");
        };
        let (body, e_tag) = (Body::Parts(upload.parts.into_values().collect()), self.e_tag());
        let object = Object { body, e_tag: e_tag.clone(), metadata: upload.metadata };
        self.objects.lock().expect("no panic while held").insert(path.to_owned(), object);
        let (bucket, key) = path.split_once('/').unwrap_or((path, ""));
        let place = format!("<Bucket>{bucket}</Bucket><Key>{}</Key>", escaped(key));
        let e_tag = format!("<ETag>{}</ETag>", escaped(&e_tag));
        Reply::xml(200, format!("<CompleteMultipartUploadResult>{place}{e_tag}</CompleteMultipartUploadResult>"))
    }

    pub(super) fn delete(&self, path: &str, upload: Option<&str>) -> Reply {
        let known = match upload {
            Some(id) => self.uploads.lock().expect("no panic while held").remove(id).is_some(),
            None => {
                self.objects.lock().expect("no panic while held").remove(path);
                true
            }
        };
        if known { Reply { status: 204, ..Reply::default() } } else { Reply::error(404, "NoSuchUpload") }
    }

    /// Deletes every `<Key>` in the request.
    pub(super) fn delete_all(&self, bucket: &str, xml: &str) -> Reply {
        for key in xml.split("<Key>").skip(1).filter_map(|rest| rest.split("</Key>").next()) {
            self.delete(&format!("{bucket}/{}", unescaped(key)), None);
        }
        Reply::xml(200, "<DeleteResult></DeleteResult>".to_owned())
    }

    pub(super) fn get(&self, path: &str, range: Option<&str>) -> Reply {
        let Some(object) = self.objects.lock().expect("no panic while held").get(path).cloned() else {
            return Reply::error(404, "NoSuchKey");
        };
        let total = object.body.len();
        let mut headers = object.metadata;
        headers.push(("etag".to_owned(), object.e_tag));
        headers.push(("last-modified".to_owned(), "Thu, 01 Jan 2026 00:00:00 GMT".to_owned()));
        headers.push(("accept-ranges".to_owned(), "bytes".to_owned()));
        let Some(range) = range else {
            return Reply { status: 200, headers, content: Some((object.body, 0..total)), text: String::new() };
        };
        let Some(range) = parsed(range, total) else {
            return Reply::error(416, "InvalidRange");
        };
        headers.push(("content-range".to_owned(), format!("bytes {}-{}/{total}", range.start, range.end - 1)));
        Reply { status: 206, headers, content: Some((object.body, range)), text: String::new() }
    }

    pub(super) fn list_uploads(&self, bucket: &str, prefix: &str) -> Reply {
        let (bucket, mut entries) = (format!("{bucket}/"), String::new());
        for (id, upload) in &*self.uploads.lock().expect("no panic while held") {
            let Some(key) = upload.path.strip_prefix(&bucket).filter(|key| key.starts_with(prefix)) else { continue };
            let named = format!("<Key>{}</Key><UploadId>{id}</UploadId>", escaped(key));
            entries += &format!("<Upload>{named}<Initiated>2026-01-01T00:00:00.000Z</Initiated></Upload>");
        }
        Reply::xml(200, format!("<ListMultipartUploadsResult>{entries}</ListMultipartUploadsResult>"))
    }

    pub(super) fn list(&self, bucket: &str, query: &BTreeMap<String, String>) -> Reply {
        let text = |name: &str| query.get(name).map_or("", String::as_str);
        let prefix = format!("{bucket}/{}", text("prefix"));
        let after = format!("{bucket}/{}", text("continuation-token"));
        let named = |key: &str| {
            if text("encoding-type") == "url" { encoded(key) } else { escaped(key) }
        };
        let page_keys = text("max-keys").parse().unwrap_or(PAGE_KEYS).min(PAGE_KEYS);
        let (mut entries, mut folders, mut last) = (String::new(), BTreeSet::new(), None);
        let objects = self.objects.lock().expect("no panic while held");
        let mut num_keys = 0;
        for (path, object) in objects.range(prefix.clone()..).take_while(|(path, _)| path.starts_with(&prefix)) {
            let key = &path[bucket.len() + 1..];
            let folder = (!text("delimiter").is_empty())
                .then(|| path[prefix.len()..].find(text("delimiter")))
                .flatten()
                .map(|end| &path[bucket.len() + 1..prefix.len() + end + text("delimiter").len()]);
            // A folder's token is the folder itself, which stands for everything in it.
            let position = format!("{bucket}/{}", folder.unwrap_or(key));
            if !text("continuation-token").is_empty() && position <= after {
                continue;
            }
            if folder.is_some_and(|folder| folders.contains(folder)) {
                continue;
            }
            if num_keys == page_keys {
                let token = format!("<NextContinuationToken>{}</NextContinuationToken>", escaped(last.unwrap_or("")));
                entries.push_str(&token);
                break;
            }
            num_keys += 1;
            last = Some(folder.unwrap_or(key));
            if let Some(folder) = folder {
                folders.insert(folder.to_owned());
                entries.push_str(&format!("<CommonPrefixes><Prefix>{}</Prefix></CommonPrefixes>", named(folder)));
                continue;
            }
            let (size, e_tag) = (object.body.len(), escaped(&object.e_tag));
            let fields = format!("<Size>{size}</Size><ETag>{e_tag}</ETag><StorageClass>STANDARD</StorageClass>");
            let modified = "<LastModified>2026-01-01T00:00:00.000Z</LastModified>";
            entries.push_str(&format!("<Contents><Key>{}</Key>{modified}{fields}</Contents>", named(key)));
        }
        let truncated = entries.contains("<NextContinuationToken>");
        let facts = format!("<Name>{bucket}</Name><Prefix>{}</Prefix>", named(text("prefix")));
        let state = format!("<KeyCount>{num_keys}</KeyCount><IsTruncated>{truncated}</IsTruncated>");
        Reply::xml(200, format!("<ListBucketResult>{facts}{state}{entries}</ListBucketResult>"))
    }
}

/// A range within `total` bytes, from `bytes=a-b`, `bytes=a-` or `bytes=-n`.
fn parsed(range: &str, total: u64) -> Option<Range<u64>> {
    let (start, end) = range.strip_prefix("bytes=")?.split_once('-')?;
    let range = match (start, end) {
        ("", last) => total.saturating_sub(last.parse().ok()?)..total,
        (start, "") => start.parse().ok()?..total,
        (start, end) => start.parse().ok()?..total.min(end.parse::<u64>().ok()? + 1),
    };
    (range.start < range.end).then_some(range)
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

fn unescaped(text: &str) -> String {
    text.replace("&lt;", "<").replace("&gt;", ">").replace("&quot;", "\"").replace("&amp;", "&")
}

fn encoded(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.~/".contains(&byte);
    text.bytes().map(|byte| if plain(byte) { (byte as char).to_string() } else { format!("%{byte:02X}") }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_understood_in_their_three_forms() {
        assert_eq!(parsed("bytes=2-3", 10), Some(2..4));
        assert_eq!(parsed("bytes=7-", 10), Some(7..10));
        assert_eq!(parsed("bytes=-4", 10), Some(6..10));
        assert_eq!(parsed("bytes=8-99", 10), Some(8..10));
        assert_eq!(parsed("bytes=10-11", 10), None);
    }

    #[test]
    fn a_range_over_parts_is_cut_from_each() {
        let objects = Objects::new(true);
        let parts = [&b"abc"[..], b"", b"defg"].map(|bytes| objects.kept(bytes.to_vec()));
        let mut written = Vec::new();
        Body::Parts(parts.to_vec()).write(1..5, &mut written).unwrap();
        assert_eq!(written, b"bcde");
    }
}
