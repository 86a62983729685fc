//! The client.

mod resolver;
