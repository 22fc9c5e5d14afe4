//! Finds shards, and where the samples of each lie. Reads no sample where its format can say without.

use std::collections::HashMap;
use std::sync::Arc;

use futures::{StreamExt, TryStreamExt, stream};
use strata_io::{ObjectInfo, Store};

use crate::bounds::Bounds;
use crate::dataset::{CONCURRENCY, Format, Layout, Place, Shard, url_of};
use crate::formats::{Fault, files, lines, mds, megatron, tar, tokens};
use crate::objects::{AHEAD_BYTES, look};
use crate::pattern::Pattern;
use crate::{Error, Result};

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
    let (bounds, layout) = match format {
        Format::Tar => (Bounds::Listed(look(store, &name, Some(size), AHEAD_BYTES, tar::scan).await?), Layout::Tar),
        Format::Tokens { dtype, header_bytes, windows } => {
            let bounds = tokens::scan(size, header_bytes, dtype, windows);
            (bounds.map_err(|fault| of(fault, store, &name))?, Layout::Tokens(dtype))
        }
        Format::Megatron { windows } => {
            let index = format!("{}.idx", name.strip_suffix(".bin").expect("others were left out"));
            let index = look(store, &index, None, AHEAD_BYTES, megatron::scan).await?;
            let bounds = megatron::bounds(&index, size, windows);
            (bounds.map_err(|fault| of(fault, store, &name))?, Layout::Tokens(index.dtype))
        }
        Format::Lines => {
            (Bounds::Listed(look(store, &name, Some(size), AHEAD_BYTES, lines::scan).await?), Layout::Line)
        }
        Format::Files => (files::bounds(size), Layout::File),
        Format::Mds => unreachable!("its shards are in an index"),
    };
    Ok(Shard { store: place.number, name, size_bytes: size, bounds, layout })
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
            let name = format!("{folder}{}", shard.name);
            let Some(&size) = sizes.get(&*name) else {
                let detail = format!("{:?} of {} bytes is not there", shard.name, shard.size_bytes);
                return Err(Error::Damaged { object: url_of(&**store, index), detail });
            };
            listed.push((name, size, shard));
        }
    }
    let scans = listed.into_iter().map(|(name, size_bytes, shard)| async move {
        let layout = Layout::Columns(shard.columns.clone());
        // Of a large shard only the offsets are wanted.
        let bounds = look(store, &name, Some(size_bytes), 0, move |object| mds::scan(object, &shard)).await?;
        Ok(Shard { store: place.number, name, size_bytes, bounds: Bounds::Listed(bounds), layout })
    });
    stream::iter(scans).buffered(CONCURRENCY).try_collect().await
}

fn of(fault: Fault, store: &Arc<dyn Store>, name: &str) -> Error {
    Error::of(fault, url_of(&**store, name), 0)
}
