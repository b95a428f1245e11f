"""The metrics page of the gateway, alone and with the pages of routers."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from gateway.metrics import GatewayMetrics, joined

PAGE = """# HELP tandem_queued Requests that wait
# TYPE tandem_queued gauge
tandem_queued 3.0
# HELP tandem_requests_total Ended choices
# TYPE tandem_requests_total counter
tandem_requests_total{path="local",end="stop"} 5.0
"""


def test_a_request_is_counted_by_route_and_status() -> None:
    metrics = GatewayMetrics()
    metrics.count_request("/v1/models", 200, 0.002)
    metrics.count_request("/v1/models", 503, 0.002)
    page = metrics.page([("one:1", PAGE)])
    assert 'tandem_gateway_requests_total{route="/v1/models",status="503"} 1.0' in page
    assert 'tandem_gateway_request_duration_seconds_count{route="/v1/models"} 2.0' in page
    assert page.endswith(PAGE), "the page of the only router, as it is"


def test_no_character_of_a_label_ends_its_line() -> None:
    """The text format ends lines at a newline only, and escapes that one in labels."""
    tenant = "".join(c for c in map(chr, range(0x3000)) if len(f"a{c}b".splitlines()) > 1 and c != "\n")
    page = joined([(name, PAGE.replace("local", tenant)) for name in ("one:1", "two:2")])
    (family,) = (found for found in text_string_to_metric_families(page) if found.name == "tandem_requests")
    assert [sample.labels["path"] for sample in family.samples] == [tenant, tenant]


def test_pages_of_several_routers_are_one_valid_page_with_a_label() -> None:
    page = joined([("one:1", PAGE), ("two:2", PAGE.replace("3.0", "4.0"))])
    families = {family.name: family for family in text_string_to_metric_families(page)}
    assert {sample.labels["router"]: sample.value for sample in families["tandem_queued"].samples} == {
        "one:1": 3.0, "two:2": 4.0,
    }  # fmt: skip
    labels = [sample.labels for sample in families["tandem_requests"].samples]
    assert labels == [{"router": name, "path": "local", "end": "stop"} for name in ("one:1", "two:2")]
    assert page.count("# TYPE tandem_queued") == 1
