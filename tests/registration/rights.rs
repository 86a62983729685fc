//! ACLs: the right that a registration needs, and what becomes of it without.

use tonic_failover::{
    InstanceId,
    consul::{ConsulConfig, RegistryError},
    server::{Registration, RegistrationStatus},
};

use super::world::{until, until_registered, until_status};
use crate::common::acl::{Guarded, in_readme};

#[tokio::test]
async fn the_right_to_write_the_service_is_needed_and_enough() {
    let Some(guarded) = Guarded::start().await else { return };
    let rules = in_readme("a backend");
    let policy = guarded.policy("backend", &rules.replace("write", "read")).await;
    let token = guarded.token("backend").await;
    let config = ConsulConfig::new(&guarded.url()).unwrap().token(&token.secret);
    let address = InstanceId::new("127.0.0.1", 4000);
    let registration = Registration::builder(config, "counter", "a", address).start().unwrap();
    let lost = |it: &RegistrationStatus| matches!(it, RegistrationStatus::Lost { .. });
    let status = until_status(&registration, "it is refused", lost).await;
    let RegistrationStatus::Lost { error: RegistryError::Forbidden { message } } = &status else {
        panic!("{status:?}");
    };
    assert!(message.contains("Permission denied"), "{message}");
    guarded.change_policy(&policy, "backend", &rules).await;
    until_registered(&registration).await;
    let passing = async || guarded.root.passing("counter").await.unwrap();
    until("it is found", async || passing().await == ["a"]).await;
    registration.leave().await;
    assert!(guarded.root.passing("counter").await.unwrap().is_empty());
}
