//! Whether the present runtime has what is needed.
//!
//! tokio answers no such question: where timers or IO are not enabled, whoever wants one
//! panics. So one of each is wanted here, where that can be told as an error, and not later in a
//! task of which nobody hears. tokio's own words come first, by the panic hook; and a program that
//! is made to abort on panics ends here, as it would later.

use std::{panic::catch_unwind, time::Duration};

use crate::client::error::BuildError;

/// # Errors
/// Names what is not enabled.
pub(super) fn check() -> Result<(), BuildError> {
    let lacks = |lacks| move |_| BuildError::Runtime { lacks };
    catch_unwind(|| drop(tokio::time::sleep(Duration::ZERO))).map_err(lacks("timers"))?;
    // One that is bound to nothing, so that nobody else notices.
    #[cfg(unix)]
    catch_unwind(|| drop(tokio::net::UnixDatagram::unbound())).map_err(lacks("IO"))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use tokio::runtime::Builder;

    use super::*;

    #[test]
    fn a_runtime_without_timers_or_io_is_refused_by_what_it_lacks() {
        let with = |enable: fn(&mut Builder) -> &mut Builder| {
            let runtime = enable(&mut Builder::new_current_thread()).build().unwrap();
            let _entered = runtime.enter();
            check().map_err(|error| error.to_string())
        };
        assert!(with(Builder::enable_io).unwrap_err().contains("timers"));
        assert!(with(Builder::enable_time).unwrap_err().contains("IO"));
        assert_eq!(with(Builder::enable_all), Ok(()));
    }
}
