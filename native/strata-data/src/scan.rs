//! Finds shards, and where the samples of each lie. Reads no sample where its format can say without.

use std::collections::HashMap;
use std::sync::Arc;

use futures::{StreamExt, TryStreamExt, stream};
use strata_io::{ObjectInfo, Store};

use crate::bounds::Bounds;
use crate::formats::compression::{self, Compression, Decompressed, in_decompressed};
use crate::formats::tokens::Windows;
use crate::formats::{self, Fault, ReadAt, files, lines, mds, megatron, tar, tokens};
use crate::objects::{AHEAD_BYTES, look};
use crate::pattern::Pattern;
use crate::shard::{Format, Layout, Place, Shard, Unit, url_of};
use crate::{Error, Result};

/// Shards whose samples are looked for at a time.
const CONCURRENCY: usize = 16;

/// The shards of `format` at `place`, sorted.
pub(crate) async fn shards(place: &Place, format: Format) -> Result<Vec<Shard>> {
    let Place { store, pattern, .. } = place;
    check(format)?;
    let mut found = matching(&**store, &named(pattern, format)).await?;
    if let Format::Megatron { .. } = format {
        found.retain(|info| info.name.ends_with(".bin"));
    }
    if found.is_empty() {
        let url = url_of(&**store, pattern);
        return Err(Error::NotFound { url, detail: "nothing of such a name is there".to_owned() });
    }
    if format == Format::Mds {
        return mds_shards(place, &found).await;
    }
    let scans = found.into_iter().map(|info| shard(place, info, format));
    stream::iter(scans).buffered(CONCURRENCY).try_collect().await
}

/// The objects whose names match, sorted; there may be none.
async fn matching(store: &dyn Store, pattern: &str) -> Result<Vec<ObjectInfo>> {
    let pattern = Pattern::new(pattern)?;
    if let Some(name) = &pattern.literal {
        return match store.size(name).await {
            Ok(size) => Ok(vec![ObjectInfo { name: name.clone(), size, modified_at: 0 }]),
            Err(strata_io::Error::NotFound { .. }) => Ok(Vec::new()),
            Err(error) => Err(error.into()),
        };
    }
    let listed = if pattern.is_deep { store.list_below(&pattern.folder) } else { store.list(&pattern.folder) };
    let mut found = listed.await?;
    found.retain(|info| pattern.matches(&info.name));
    Ok(found)
}

fn check(format: Format) -> Result<()> {
    let windows = match format {
        Format::Tar | Format::Mds | Format::Lines | Format::Files => return Ok(()),
        Format::Tokens { dtype, .. } if !dtype.is_integer() => {
            return Err(Error::Config(format!("tokens of {}: expected whole numbers", dtype.name())));
        }
        Format::Tokens { windows: Windows { with_documents: true, .. }, .. } => {
            let detail = "documents of files that are nothing but tokens: expected the format of Megatron-LM";
            return Err(Error::Config(detail.to_owned()));
        }
        Format::Tokens { windows, .. } | Format::Megatron { windows } => windows,
    };
    if windows.window == 0 || windows.stride == 0 {
        return Err(Error::Config(format!("{windows:?}: expected numbers above 0")));
    }
    Ok(())
}

/// What is looked for: the index, where folders are named that have one.
fn named(pattern: &str, format: Format) -> String {
    let is_folder = pattern.is_empty() || pattern.ends_with('/');
    if format == Format::Mds && is_folder { format!("{pattern}index.json") } else { pattern.to_owned() }
}

async fn shard(place: &Place, info: ObjectInfo, format: Format) -> Result<Shard> {
    let store = &place.store;
    let ObjectInfo { name, size, .. } = info;
    let mut unit = None;
    let (bounds, layout) = match format {
        Format::Tar => {
            let bounds;
            (bounds, unit) = listed(store, &name, size, |object| tar::scan(object)).await?;
            (bounds, Layout::Tar)
        }
        Format::Lines => {
            let bounds;
            (bounds, unit) = listed(store, &name, size, |object| lines::scan(object)).await?;
            (bounds, Layout::Line)
        }
        Format::Tokens { dtype, header_bytes, windows } => {
            if let Some(compression) = Compression::of_name(&name) {
                let detail = format!("is {} by its name, expected tokens that are not compressed", compression.name());
                return Err(Error::Damaged { object: url_of(&**store, &name), detail });
            }
            let bounds = tokens::scan(size, header_bytes, dtype, windows);
            (bounds.map_err(|fault| of(fault, store, &name))?, Layout::Tokens { dtype, breaks: None })
        }
        Format::Megatron { windows } => {
            let index = format!("{}.idx", name.strip_suffix(".bin").expect("others were left out"));
            let read = move |object: &(dyn ReadAt + 'static)| {
                let index = megatron::scan(object)?;
                let breaks = windows.with_documents.then(|| megatron::breaks(object, &index)).transpose()?;
                Ok((index, breaks.map(Into::into)))
            };
            let (index, breaks) = look(store, &index, None, AHEAD_BYTES, read).await?;
            let bounds = megatron::bounds(&index, size, windows);
            (bounds.map_err(|fault| of(fault, store, &name))?, Layout::Tokens { dtype: index.dtype, breaks })
        }
        Format::Files => (files::bounds(size), Layout::File),
        Format::Mds => unreachable!("its shards are in an index"),
    };
    Ok(Shard { store: place.number, name, size_bytes: size, unit, bounds, layout })
}

/// What `scan` finds in the object `name`, or in what its name says that it is to be decompressed to.
async fn listed(
    store: &Arc<dyn Store>,
    name: &str,
    size: u64,
    scan: fn(&dyn ReadAt) -> formats::Result<Vec<u64>>,
) -> Result<(Bounds, Option<Unit>)> {
    let named = Compression::of_name(name);
    let scan = move |object: &(dyn ReadAt + 'static)| {
        compression::check(named, object)?;
        let Some(compression) = named else { return Ok((Bounds::Listed(scan(object)?), None)) };
        let (bounds, size_bytes) = decompressed(object, compression, scan).map_err(in_decompressed)?;
        Ok((Bounds::Listed(bounds), Some(Unit { compression, size_bytes })))
    };
    look(store, name, Some(size), AHEAD_BYTES, scan).await
}

/// What `scan` finds, and how many bytes there are.
fn decompressed(
    object: &dyn ReadAt,
    compression: Compression,
    scan: fn(&dyn ReadAt) -> formats::Result<Vec<u64>>,
) -> formats::Result<(Vec<u64>, u64)> {
    let stream = Decompressed::new(object, compression, u64::MAX)?;
    let bounds = scan(&stream)?;
    let (last, size) = (*bounds.last().expect("one at least"), stream.end()?);
    if last > size {
        let detail = format!("expected the last sample to end at {last}, found the end");
        return Err(Fault::Damage { at: size, detail });
    }
    Ok((bounds, size))
}

/// The shards that each index lists, in its order.
async fn mds_shards(place: &Place, indexes: &[ObjectInfo]) -> Result<Vec<Shard>> {
    let store = &place.store;
    let mut listed = Vec::new();
    for ObjectInfo { name: index, .. } in indexes {
        let shards = mds::shards(&store.read(index, None).await?).map_err(|fault| of(fault, store, index))?;
        let folder = &index[..index.rfind('/').map_or(0, |slash| slash + 1)];
        let there = store.list_below(folder).await?;
        let sizes: HashMap<&str, u64> = there.iter().map(|info| (&*info.name, info.size)).collect();
        for shard in shards {
            // What others have decompressed is there beside it, or instead.
            let zip = shard.zip.as_ref().map(|zip| (&zip.name, Some(zip.compression)));
            let known = [(&shard.name, None)].into_iter().chain(zip);
            let kept = |(name, compression): (&String, _)| {
                let name = format!("{folder}{name}");
                sizes.get(&*name).map(|&size| (name, size, compression))
            };
            let Some((name, size, compression)) = known.into_iter().find_map(kept) else {
                let name = shard.zip.as_ref().map_or(&shard.name, |zip| &zip.name);
                let detail = format!("{name:?} is not there, of a shard of {} bytes", shard.size_bytes);
                return Err(Error::Damaged { object: url_of(&**store, index), detail });
            };
            listed.push((name, size, compression, shard));
        }
    }
    let scans = listed.into_iter().map(|(name, size_bytes, compression, shard)| async move {
        let layout = Layout::Columns(shard.columns.clone());
        let unit = compression.map(|compression| Unit { compression, size_bytes: shard.size_bytes });
        // Of a large shard only the offsets are wanted.
        let bounds = look(store, &name, Some(size_bytes), 0, move |object| match compression {
            None => mds::scan(object, &shard),
            Some(named) => {
                compression::check(compression, object)?;
                let stream = Decompressed::new(object, named, shard.size_bytes)?;
                mds::scan(&stream, &shard).map_err(in_decompressed)
            }
        });
        let bounds = Bounds::Listed(bounds.await?);
        Ok(Shard { store: place.number, name, size_bytes, unit, bounds, layout })
    });
    stream::iter(scans).buffered(CONCURRENCY).try_collect().await
}

fn of(fault: Fault, store: &Arc<dyn Store>, name: &str) -> Error {
    Error::of(fault, url_of(&**store, name), 0)
}
