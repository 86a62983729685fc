//! Access to Consul.
