//! The same cases on the embedded agent and on a real Consul. A difference is a
//! defect of the embedded one.

#![allow(clippy::unwrap_used, reason = "these are tests")]

#[path = "conformance/world.rs"]
mod world;

#[path = "conformance/acl.rs"]
mod acl;
#[path = "conformance/blocking.rs"]
mod blocking;
#[path = "conformance/checks.rs"]
mod checks;
#[path = "conformance/choice.rs"]
mod choice;
#[path = "conformance/datacenters.rs"]
mod datacenters;
#[path = "conformance/faults.rs"]
mod faults;
#[path = "conformance/keys.rs"]
mod keys;
#[path = "conformance/refusals.rs"]
mod refusals;
#[path = "conformance/shape.rs"]
mod shape;

/// Makes two tests of each case.
macro_rules! cases {
    ($($datacenters:literal datacenters: $($group:ident :: $case:ident),* ;)*) => {
        mod embedded {
            $($(
                #[tokio::test]
                async fn $case() {
                    super::$group::$case(super::world::World::embedded($datacenters).await).await;
                }
            )*)*
        }
        mod real {
            $($(
                #[tokio::test]
                async fn $case() {
                    if let Some(world) = super::world::World::real($datacenters, stringify!($case)).await {
                        super::$group::$case(world).await;
                    }
                }
            )*)*
        }
    };
}

cases! {
    1 datacenters:
        shape::an_entry_has_every_field_of_a_real_one,
        shape::what_is_not_given_has_its_default,
        shape::addresses_that_are_ip_addresses_are_tagged,
        shape::odd_ports_and_addresses_come_through,
        shape::instances_with_one_address_are_both_listed_by_id,
        shape::names_and_ids_may_hold_odd_characters,
        shape::the_agents_own_lists_differ_from_the_catalogs,
        shape::the_agent_tells_of_one_service_what_it_has_registered,
        shape::the_catalog_lists_services_with_their_tags,
        shape::an_agent_tells_about_itself,
        shape::weights_left_out_are_one_or_nothing,
        shape::reads_carry_consuls_headers,
        choice::passing_drops_warning_and_critical,
        choice::maintenance_is_a_critical_check,
        choice::all_tags_must_be_there_in_any_case,
        choice::filters_choose,
        choice::bad_filters_are_refused_by_the_servers,
        choice::node_metadata_chooses,
        choice::near_is_taken,
        blocking::an_index_is_never_0_and_moves_for_its_own_service,
        blocking::a_query_blocks_until_its_service_changes,
        blocking::a_query_for_an_unknown_service_wakes_when_it_comes_or_any_dies_out,
        blocking::unrelated_changes_and_unchanged_repetitions_wake_nobody,
        blocking::a_wait_ends_with_the_same_index,
        blocking::an_index_in_the_future_waits_and_gives_the_real_one,
        blocking::index_0_and_an_older_index_do_not_block,
        blocking::an_agent_in_memory_loses_everything_when_restarted,
        blocking::the_list_of_services_blocks_too,
        checks::a_ttl_check_expires_and_passes_again,
        checks::a_ttl_heartbeat_that_repeats_itself_stays_in_the_agent,
        checks::only_ttl_checks_take_heartbeats,
        checks::update_gives_status_and_output,
        checks::registering_again_keeps_the_status,
        checks::registering_again_starts_the_ttl_anew,
        checks::checks_stay_until_they_are_replaced,
        checks::several_checks_are_numbered_and_an_id_has_one_owner,
        checks::a_tcp_check_follows_the_listener,
        checks::a_grpc_check_follows_the_health_service,
        checks::deregistering_takes_the_checks_along,
        refusals::bad_parameters_are_named,
        refusals::bad_registrations_are_named,
        refusals::odd_registrations_are_taken,
        refusals::bad_maintenance_is_named,
        refusals::other_methods_and_paths_are_refused,
        refusals::the_two_hundred_and_first_connection_is_reset,
        keys::a_key_is_read_as_it_was_written,
        keys::the_very_same_once_more_moves_no_index,
        keys::a_write_may_go_by_an_index,
        keys::keys_are_listed_and_deleted_by_how_they_begin,
        keys::a_question_about_keys_waits_for_its_own,
        keys::what_keys_refuse_is_named,
        keys::a_transaction_is_done_as_a_whole_or_not_at_all,
        keys::a_transaction_that_only_reads_says_so,
        keys::what_transactions_refuse_is_named,
        keys::keys_go_when_an_agent_in_memory_is_restarted,
        acl::rights_are_not_told_where_acls_are_off;
    2 datacenters:
        datacenters::the_own_one_comes_first,
        datacenters::a_question_is_forwarded,
        datacenters::a_blocking_question_is_forwarded,
        datacenters::an_unknown_one_is_refused_with_an_index_that_means_nothing,
        datacenters::a_dead_one_is_refused_and_still_listed,
        keys::keys_of_another_datacenter_are_asked_for_through_ones_own;
}
