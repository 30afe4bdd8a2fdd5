// SPDX-License-Identifier: Apache-2.0
/*
 * Quality of decisions in a simulated fleet (bench/sim), on small workloads with fixed seeds. Margins are
 * wide: select_sim has the figures.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "sim/sim.h"

static struct sim_workload bursts, agents, many_agents;

static struct sim_result run(const struct sim_workload *w, struct sim_settings set)
{
    struct sim_result result;

    set.workers = 8;
    set.blocks = 30000;
    set.seed = 1;
    sim_run(w, &set, &result);
    return result;
}

static int set_up(void **state)
{
    (void)state;
    sim_make_fanout(150, 7, &bursts);
    sim_make_agents(80, 7, &agents);
    sim_make_agents(300, 6, &many_agents);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    sim_workload_fini(&bursts);
    sim_workload_fini(&agents);
    sim_workload_fini(&many_agents);
    return 0;
}

/* Siblings of a fresh prefix: predictions make them meet, and are worth a third at least. */
static void test_prediction(void **state)
{
    struct sim_settings set = {.policy = "adaptive", .rate = 18};
    struct sim_result blind = run(&bursts, set), with;

    (void)state;
    set.predict = true;
    with = run(&bursts, set);
    assert_true(with.ttft < .7 * blind.ttft);
    assert_true(with.hits > 1.5 * blind.hits);
}

static void test_policies(void **state)
{
    struct sim_settings set = {.policy = "adaptive", .rate = 6, .predict = true};
    struct sim_result adaptive = run(&agents, set), dynamo, least, prefix;

    (void)state;
    set.predict = false;
    set.policy = "dynamo";
    dynamo = run(&agents, set);
    set.policy = "least";
    least = run(&agents, set);
    set.policy = "prefix";
    prefix = run(&agents, set);
    assert_true(adaptive.ttft < .95 * dynamo.ttft);
    assert_true(adaptive.token_s < 1.02 * dynamo.token_s);
    assert_true(adaptive.ttft < .6 * least.ttft);
    assert_true(adaptive.ttft < prefix.ttft);
    assert_true(adaptive.hits > least.hits);
}

/*
 * Agents at load .7: most tokens are held, so few workers have waiting ones. Sessions stay where they
 * are all the same. With a weight by busy workers alone, sessions move until caches thrash: 12.6 s
 * instead of 0.5, hits .83 instead of .91.
 */
static void test_agents(void **state)
{
    struct kvsel_params fixed = {.size = sizeof(fixed), .own_weight = 4, .context_weight = .1};
    struct sim_settings set = {.policy = "adaptive", .rate = 6.65, .predict = true};
    struct sim_result adaptive = run(&many_agents, set), weight4;

    (void)state;
    set.params = &fixed;
    weight4 = run(&many_agents, set);
    assert_true(adaptive.ttft < 1.5 * weight4.ttft);
    assert_true(adaptive.ttft < 3);
    assert_true(adaptive.hits > .88);
    assert_true(adaptive.busiest < 1.25);
}

/* Three replicas that know each other's bookings after 5 ms are nearly as good as one. */
static void test_replicas(void **state)
{
    struct sim_settings set = {.policy = "adaptive", .rate = 18, .predict = true};
    struct sim_result one = run(&bursts, set), three, strangers;

    (void)state;
    set.replicas = 3;
    set.delay_s = .005;
    three = run(&bursts, set);
    set.delay_s = -1;
    strangers = run(&bursts, set);
    assert_true(three.ttft < 1.15 * one.ttft);
    assert_true(strangers.ttft > 1.2 * one.ttft);
}

/* Two workers at half speed: knowing that is better than not. */
static void test_speeds(void **state)
{
    struct sim_settings set = {.policy = "adaptive", .rate = 5, .predict = true, .slow = 2};
    struct sim_result equal = run(&agents, set), learned;

    (void)state;
    set.learn = true;
    learned = run(&agents, set);
    assert_true(learned.ttft < equal.ttft);
    assert_true(learned.over_p99 < equal.over_p99);
}

/* The same seeds give the same figures, to the last bit. */
static void test_deterministic(void **state)
{
    struct sim_settings set = {.policy = "adaptive", .rate = 6, .predict = true, .learn = true};
    struct sim_result one = run(&agents, set), two = run(&agents, set);

    (void)state;
    assert_true(one.ttft == two.ttft && one.over_p99 == two.over_p99 && one.hits == two.hits);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_prediction), cmocka_unit_test(test_policies),
        cmocka_unit_test(test_agents),     cmocka_unit_test(test_replicas),
        cmocka_unit_test(test_speeds),     cmocka_unit_test(test_deterministic),
    };

    return cmocka_run_group_tests(tests, set_up, tear_down);
}
