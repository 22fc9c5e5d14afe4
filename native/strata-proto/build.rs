//! Compiles proto/strata/v1 with protox, so that no protoc binary is needed.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let root = "../../proto";
    println!("cargo:rerun-if-changed={root}");
    let files = protox::compile(["strata/v1/checkpoint.proto"], [root])?;
    prost_build::Config::new().compile_fds(files)?;
    Ok(())
}
