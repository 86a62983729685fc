//! Being found in Consul, and leaving: each case on a real Consul and on the testkit's agent.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

#[path = "../common/mod.rs"]
mod common;

mod entries;
mod leaving;
mod processes;
mod rights;
mod signs;
mod world;

/// Makes two tests of each case.
macro_rules! cases {
    ($($group:ident :: $case:ident),* $(,)?) => {
        mod embedded {
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $case() {
                    super::$group::$case(super::world::World::embedded().await).await;
                }
            )*
        }
        mod real {
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $case() {
                    if let Some(world) = super::world::World::real().await {
                        super::$group::$case(world).await;
                    }
                }
            )*
        }
    };
}

cases! {
    entries::it_is_found_with_all_that_was_given,
    entries::it_is_registered_again_whenever_it_was_forgotten_or_changed,
    entries::an_older_process_of_the_same_instance_gives_way,
    entries::another_process_that_takes_the_id_is_let_be_and_told_of,
    entries::a_change_of_role_moves_tag_and_metadata_and_leaves_the_check_passing,
    entries::an_operators_maintenance_outlives_a_change_of_role,
    signs::what_serves_nothing_is_not_registered_and_gets_no_heartbeat,
    signs::a_tcp_check_and_a_grpc_check_follow_the_server,
    signs::heartbeats_come_from_a_runtime_of_their_own,
    signs::it_is_registered_when_consul_comes_and_an_outage_is_told_once,
    signs::dropped_it_says_nothing_and_turns_critical,
    leaving::it_leaves_in_order,
    leaving::calls_in_flight_are_answered_and_streams_told_to_end,
    leaving::a_call_that_does_not_end_is_not_waited_for_for_ever,
    leaving::with_consul_away_leaving_ends_in_time,
    leaving::leaving_is_one_whoever_asks_for_it,
}
