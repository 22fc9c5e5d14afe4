//! One ranged GET as a sequence: its head, its bytes, its end.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use futures::stream::{self, BoxStream};
use futures::{StreamExt, TryFutureExt, TryStreamExt};
use object_store::path::Path;
use object_store::{GetOptions, GetRange};

use super::Remote;
use super::http::Call;

/// A request under way.
pub(super) struct Body {
    /// Where its next byte belongs.
    pub(super) at: u64,
    call: Arc<Call>,
    generation: u64,
    rest: BoxStream<'static, object_store::Result<Got>>,
}

/// What came.
pub(super) enum Got {
    /// The head of the answer, before anything else.
    Head(Head),
    /// The next bytes.
    Bytes(Bytes),
    /// All there is.
    End,
    /// Nothing more.
    Failed(object_store::Error),
}

/// What the head of an answer says.
pub(super) struct Head {
    pub(super) e_tag: Option<String>,
    /// Size of the whole object.
    pub(super) size: u64,
    /// What follows of it.
    pub(super) range: Range<u64>,
}

impl Body {
    /// Asks for `range` (to the end, if it ends at `u64::MAX`) of the version `e_tag`.
    pub(super) fn ask(remote: &Remote, key: &Path, range: Range<u64>, e_tag: Option<String>) -> Self {
        let (objects, key, at) = (remote.bucket.objects.clone(), key.clone(), range.start);
        let (call, generation) = (Call::with_headers(Vec::new()), remote.bucket.signing.generation());
        // A weak tag never matches a condition (RFC 9110, 13.1.1); it is still compared by the reader.
        let if_match = e_tag.filter(|tag| !tag.starts_with("W/"));
        let range = if range.end == u64::MAX { None } else { Some(GetRange::Bounded(range)) };
        let options = GetOptions { range, if_match, ..GetOptions::default() };
        let own = call.clone();
        let answered = async move { own.scope(objects.get_opts(&key, options)).await };
        let rest = answered.map_ok(|answer| {
            let (e_tag, size) = (answer.meta.e_tag.clone(), answer.meta.size);
            let head = Got::Head(Head { e_tag, size, range: answer.range.clone() });
            stream::iter([Ok(head)]).chain(answer.into_stream().map_ok(Got::Bytes))
        });
        Self { at, call, generation, rest: rest.try_flatten_stream().boxed() }
    }

    /// The call, and the generation of the keys it was signed with.
    pub(super) fn sent(&self) -> (Arc<Call>, u64) {
        (self.call.clone(), self.generation)
    }

    /// Waits for more.
    ///
    /// # Cancel safety
    /// Nothing is lost when a wait is dropped.
    pub(super) async fn next(&mut self) -> Got {
        match self.rest.next().await {
            Some(Ok(got)) => got,
            Some(Err(error)) => Got::Failed(error),
            None => Got::End,
        }
    }
}
