# SPDX-License-Identifier: Apache-2.0
"""The web page of kv-indexer in a headless Chromium: what it shows, what it may load, who may see it.

    test_page.py --pictures    makes docs/pictures/page-*.png anew
"""
import atexit
import json
import pathlib
import sys
import tempfile

from browser import Browser
from kvtest import *

HTML = {"Accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
FILES = ["page.css", "page.js", "api.js", "format.js", "workers.js", "charts.js", "explain.js", "chart.js", "icon.svg"]
TOKENS = list(range(100, 164))  # four blocks of 16
NOWHERE = "tcp://127.0.0.1:1"
HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>&amp;'\"`${1}"
SHOWN = "performance.getEntriesByName('shown').length"
browser = None


def chromium():
    """The browser that all tests share; starting one takes a second."""
    global browser
    if browser is None:
        browser = Browser()
        atexit.register(browser.close)
    browser.open("about:blank")  # the last test's page may have asked a kv-indexer that is gone
    browser.resize(1280, 900)
    browser.scheme("light")
    browser.lines.clear()
    browser.requests.clear()
    return browser


def has_charts(indexer):
    """Whether Chart.js was there when kv-indexer was built; else the table is open in its place."""
    return len(indexer.get("/ui/chart.js").body) > 10000


def opened(indexer):
    page = chromium()
    page.open(indexer.url + "/")
    page.wait(SHOWN)
    return page


def refresh(page):
    """Let the page load all now, by its button: it is paused, and goes on."""
    page.run("document.querySelector('#updated').textContent = '', [1, 2].forEach(() => document.querySelector('#pause').click())")
    page.wait("document.querySelector('#updated').innerText")


def quiet(page, indexer):
    """Nothing was complained of, and nothing was asked of another server."""
    equal(page.lines, [], "the console's lines")
    equal([url for url in page.requests if not url.startswith((indexer.url, "about:"))], [], "requests to others")


def submit(page, text, kind="auto", **fields):
    page.choose("#explain-kind", kind)
    page.run("document.querySelector('#explain-result').replaceChildren()")
    page.type("#explain-text", text)
    for name in ("lora", "salt"):
        page.run(f"document.querySelector('#explain-{name}').value = {json.dumps(fields.get(name, ''))}")
    page.click("#explain-form button[type=submit]")
    page.wait("document.querySelector('#explain-result').innerText")
    return page.table("#explain-rows")


def tile(page, title):
    return page.run(f"[...document.querySelectorAll('#tiles > div')].find((t) => t.children[0].innerText === {json.dumps(title)})"
                    ".children[1].innerText")


# -- files and rules of access, without a browser ------------------------------------------------------------------------

def test_files_and_headers():
    with Indexer() as indexer:
        page = indexer.get("/", headers=HTML)
        check(page.body.startswith(b"<!doctype html>"), "a browser gets the page")
        for name in FILES:
            equal(indexer.get("/ui/" + name).status, 200, name)
            check(f"/ui/{name}".encode() in page.body + indexer.get("/ui/page.js").body + indexer.get("/ui/charts.js").body, f"{name} is used")
        for reply in (page, *(indexer.get("/ui/" + name) for name in FILES)):
            policy = dict(rule.strip().split(" ", 1) for rule in reply.headers["Content-Security-Policy"].split(";"))
            equal(policy, {"default-src": "'none'", "script-src": "'self'", "style-src": "'self'", "img-src": "'self'", "connect-src": "'self'",
                           "base-uri": "'none'", "form-action": "'none'", "frame-ancestors": "'none'"})
            equal([reply.headers[name] for name in ("Referrer-Policy", "X-Content-Type-Options", "X-Frame-Options", "Cache-Control")],
                  ["no-referrer", "nosniff", "DENY", "no-cache"])
            again = indexer.get("/ui/page.css", headers={"If-None-Match": indexer.get("/ui/page.css").headers["ETag"]})
            equal((again.status, again.body), (304, b""))
        check(b"<style" not in page.body and b"style=" not in page.body and b"onclick" not in page.body, "nothing inline")
        for accept in ({}, {"Accept": "*/*"}, {"Accept": "application/json"}, {"Accept": "text/htmlx"}, {"Accept": "x-text/html"}):
            root = indexer.get("/", headers=accept)
            equal((root.json()["service"], root.headers["Content-Type"], root.headers["Vary"]), ("kv-indexer", "application/json", "Accept"), accept)
        check(not any("/ui/" in line for line in indexer.get("/").json()["endpoints"]), "files of the page are no endpoints")
        equal(indexer.request("HEAD", "/", headers=HTML).headers["Content-Type"], "text/html; charset=utf-8")
        equal(indexer.post("/", {}, headers=HTML).status, 405)
        equal(indexer.get("/ui/").status, 404)
        equal(indexer.get("/ui/../overview").status, 404)
        for path in ("/", "/ui/page.js"):  # a page under another name of this machine: DNS rebinding
            equal(indexer.get(path, headers={**HTML, "Host": "evil.example"}).status, 403, path)


def test_files_hold_no_secret():
    with tempfile.NamedTemporaryFile("w") as tokens:
        tokens.write("s3cret\n")
        tokens.flush()
        with Indexer("--auth-token-file", tokens.name) as indexer:
            for path in ("/", *("/ui/" + name for name in FILES)):
                equal(indexer.get(path, headers=HTML).status, 200, path)
            for path in ("/", "/overview", "/history", "/workers", "/metrics"):
                equal(indexer.get(path).status, 401, path)
            equal(indexer.post("/explain", {}).status, 401)
            equal(indexer.get("/", headers={"Authorization": "Bearer s3cret"}).json()["service"], "kv-indexer")


# -- the page ----------------------------------------------------------------------------------------------------------

def test_shows_what_the_api_says():
    with Indexer("--history-interval", "500ms") as indexer, Publisher() as one, Publisher() as two:
        indexer.register(1, one)
        indexer.register("pod-2", two, dp_rank=3)
        indexer.register(3, NOWHERE, tenant_id="other")
        one.store([1, 2, 3, 4], TOKENS)
        one.store([5], range(16), medium="CPU")
        two.store([1, 2], TOKENS[:32])
        indexer.wait_score(TOKENS, 1, 64)
        indexer.wait_score(TOKENS, "pod-2", 32, rank=3)
        for _ in range(40):
            indexer.query(TOKENS)
        wait_until(lambda: sum(s["queries"] for s in indexer.get("/history").json()["samples"]) >= 40, 30, "a sample with the queries")
        page = opened(indexer)
        page.wait("document.querySelector('#workers-rows').rows.length === 3")
        page.wait("document.querySelector('#workers-rows').innerText.includes('no answer')")
        refresh(page)
        overview = indexer.get("/overview").json()
        models = {m["tenant_id"]: m for m in overview["models"]}
        for title, figure in (("Workers", 3), ("Partial views", overview["partial_ranks"]),
                              ("Prefix tree", sum(m["blocks"] for m in models.values())),
                              ("Held by workers", sum(m["holder_blocks"] for m in models.values()))):
            equal(tile(page, title), str(figure), title)
        metrics = indexer.metrics()
        found = 100 * metrics["kv_indexer_query_matched_blocks_total"] / metrics["kv_indexer_query_blocks_total"]
        equal(tile(page, "Found"), f"{found:.3g} %")
        rows = {(row[0], row[1]): row for row in page.table("#workers-rows")}
        equal(sorted(rows), [("1", "0"), ("3", "0"), ("pod-2", "3")])
        for worker in indexer.workers():
            rank, listener = next(iter(worker["listeners"].items()))
            row = rows[str(worker["instance_id"]), rank]
            check(row[3].startswith(listener["status"]) and listener["endpoint"] in row[3], f"stream: {row}")
            equal((row[4].split("\n")[0], row[5]), ("partial" if listener["partial"] else "whole", str(listener["blocks"])))
            for reason in listener.get("partial_reasons", []):
                check(reason in row[4], f"{reason}: {row}")
        equal(rows["3", "0"][2], f"{MODEL} (other)")
        equal([row[:2] for row in page.table("#reasons-rows")], [["nothing_yet", "1"]])
        for row in page.table("#models-rows"):
            model, tiers = models[row[1]], models[row[1]]["tier_blocks"]
            equal(row[2:11], [str(n) for n in (model["block_size"], model["blocks"], model["chains"], model["holder_blocks"], tiers["device"],
                                               tiers["host_pinned"], tiers["disk"], tiers["external"], model["parked"])])
        if has_charts(indexer):
            page.click("#hour-table summary")
        page.wait("document.querySelector('#hour-rows').rows.length > 1")
        shown, samples = page.table("#hour-rows"), indexer.get("/history").json()["samples"]
        first = samples[0]
        equal(shown[-1][6:9], [str(first["blocks"]), str(first["holder_blocks"]), f"{first['active_ranks']} of {first['ranks']}"])
        if has_charts(indexer):
            page.wait("document.querySelectorAll('#charts canvas').length === 8")
            label = page.run("document.querySelector('#charts canvas').getAttribute('aria-label')")
            check(label.startswith("Queries a second. Last: queries"), label)
            drawn = page.run("[...document.querySelectorAll('#charts canvas')].map((c) => "
                             "new Set(c.getContext('2d').getImageData(0, 0, c.width, c.height).data).size)")
            check(all(colours > 8 for colours in drawn), f"charts are drawn: {drawn}")
        quiet(page, indexer)


def test_explain_box():
    with Indexer() as indexer, Publisher() as one, Publisher() as two:
        indexer.register(1, one)
        indexer.register(18446744073709551557, two)  # JavaScript's numbers have 53 bits
        one.store([1, 2, 3, 4], TOKENS)
        two.store([(1 << 64) - 9, 1002], TOKENS[:32])
        indexer.wait_score(TOKENS, 1, 64)
        indexer.wait_score(TOKENS, 18446744073709551557, 32)
        page = opened(indexer)
        plain = " ".join(map(str, TOKENS))
        for text in (plain, plain.replace(" ", ", "), json.dumps(TOKENS), json.dumps({"token_ids": TOKENS, "model_name": MODEL}),
                     json.dumps({"model": MODEL, "prompt": TOKENS, "max_tokens": 5}), json.dumps({"model": MODEL, "prompt": [TOKENS]})):
            rows = submit(page, text)
            equal([row[0] for row in rows], ["1", "18446744073709551557"], text[:60])
            check("4 of 4 blocks, 64 tokens" in rows[0][1] and rows[0][2] == "the end" and rows[0][3].startswith("whole"), rows[0])
            check("2 of 4 blocks" in rows[1][1] and rows[1][2].startswith("block 2\ntokens 32 to 47") and rows[1][3].startswith("not_held"), rows[1])
        widths = page.run("[...document.querySelectorAll('#explain-rows .bar')].map((b) => b.children[0].offsetWidth / b.offsetWidth)")
        check(abs(widths[0] - 1) < 0.02 and abs(widths[1] - 0.5) < 0.02, f"bars: {widths}")
        hashes = indexer.post("/explain", {"token_ids": TOKENS, "model_name": MODEL}).json()["block_hashes"]
        for text in ("\n".join(map(str, hashes)), " ".join(map(hex, hashes)), json.dumps(hashes), json.dumps([h - (1 << 64) for h in hashes])):
            rows = submit(page, text, "block_hashes")
            check("4 of 4 blocks" in rows[0][1] and f"hash {hashes[2]}" in rows[1][2], rows)
        check("4 of 4 blocks" in submit(page, "1 2 3 4", "sequence_hashes")[0][1], "by the engine's hashes")
        check("other_hashes" in submit(page, "1 2 3 4", "sequence_hashes")[1][3], "another engine's hashes")
        check("2 of 3 blocks" in submit(page, f"{(1 << 64) - 9} 1002 3", "sequence_hashes")[1][1], "hashes of 64 bits")
        rows = submit(page, plain, lora="tuned")
        check("other_namespace" in rows[0][3] and "without lora_name" in rows[0][3], rows[0])
        for text, words in ((json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}), "tokenizer"),
                            (json.dumps({"model": MODEL, "prompt": "hi"}), "tokenizer"), ("one two", "whole numbers"), ("{\"a\": ", "isn't"),
                            ("{}", "No token_ids"), ("1.5 2", "whole numbers"), (json.dumps({"model": "nobody", "prompt": [1]}), "no indexer for"),
                            ("-1", "token_ids")):
            equal(submit(page, text), page.table("#explain-rows"))
            check(words in page.text("#explain-result"), f"{text}: {page.text('#explain-result')}")
            check(page.run("document.querySelector('#explain-ranks').hidden"), "no table of ranks beside a problem")
        equal([line for line in page.lines if "422" not in line and "404" not in line], [], "the console's lines")


def test_hostile_names():
    with Indexer() as indexer, Publisher() as one:
        indexer.register(HOSTILE, one, model_name=HOSTILE, tenant_id=HOSTILE)
        indexer.register(2, f"ipc:///tmp/{HOSTILE[:40].replace('/', '')}", model_name=HOSTILE, tenant_id=HOSTILE)
        one.store([1], TOKENS[:16], lora_name=HOSTILE)
        one.store([2], TOKENS[:16], medium=HOSTILE)  # an unknown medium
        wait_until(lambda: indexer.get("/overview").json()["models"][0]["blocks"] == 1)
        page = opened(indexer)
        rows = page.table("#workers-rows")
        check(HOSTILE in [row[0] for row in rows] and all(HOSTILE in row[2] for row in rows), rows)
        equal(page.table("#models-rows")[0][:2], [HOSTILE, HOSTILE])
        rows = submit(page, json.dumps({"token_ids": TOKENS, "lora_name": HOSTILE}))
        check(rows[0][0] == HOSTILE and "1 of 4 blocks" in rows[0][1], rows)
        submit(page, json.dumps({"token_ids": TOKENS, "model": HOSTILE + "?"}))
        check(HOSTILE[:60] in page.text("#explain-result"), page.text("#explain-result"))
        page.type("#search", HOSTILE[:10])
        page.wait("document.querySelector('#range').innerText.startsWith('1 to 2 of 2')")
        equal(page.run("[document.title, document.querySelectorAll('img, main script, iframe').length]"), ["kv-indexer", 0])
        equal([line for line in page.lines if "404" not in line], [], "the console's lines")


def test_token():
    with tempfile.NamedTemporaryFile("w") as tokens:
        tokens.write("s3cret\n")
        tokens.flush()
        with Indexer("--auth-token-file", tokens.name, headers={"Authorization": "Bearer s3cret"}) as indexer:
            indexer.register(1, NOWHERE)
            page = chromium()
            page.open(indexer.url + "/")
            page.wait("document.activeElement.id === 'token'")
            check(page.run("document.querySelector('main').hidden"), "nothing is shown without a token")
            page.type("#token", "wrong")
            page.key("Enter")
            page.wait("document.querySelector('#notice').innerText.includes('unknown token')")
            page.type("#token", "s3cr\u03b5t")  # no header can have it
            page.key("Enter")
            page.wait("document.querySelector('#notice').innerText.includes('The token was refused: it has characters')")
            page.type("#token", "s3cret")
            page.click("#token-form button")
            page.wait("document.querySelector('#workers-rows').rows.length === 1")
            check(page.run("document.querySelector('#token-form').hidden && document.querySelector('#notice').hidden"), "the question is gone")
            equal(page.run("[Object.values(sessionStorage), Object.values(localStorage), document.cookie]"), [["s3cret"], [], ""])
            page.command("Page.reload")
            page.wait("document.querySelector('#workers-rows').rows.length === 1")
            page.run("sessionStorage.clear()")


def test_clock_that_jumps():
    """Samples are as far apart as their spans say, also where the server's clock was set back between two of them."""
    with Indexer("--history-interval", "200ms") as indexer:
        wait_until(lambda: indexer.get("/history").json()["next"] > 5)
        page = opened(indexer)
        page.run("document.querySelector('#pause').click()")  # the answers are the server's own, but for the time
        page.run("""(() => { const ask = window.fetch; window.fetch = async (path, options) => {
            const answer = await ask(path, options);
            if (!String(path).startsWith('/history')) return answer;
            const told = await answer.json();
            told.samples.forEach((sample) => { sample.time_ms -= 3600000; sample.span_ms = 1000; });
            return new Response(JSON.stringify(told), {status: 200}); }; })()""")
        n = indexer.get("/history").json()["next"]
        wait_until(lambda: indexer.get("/history").json()["next"] > n + 3)
        page.run("document.querySelector('#hour-table').open = true")
        page.run("document.querySelector('#pause').click()")
        page.wait(f"document.querySelector('#hour-rows').rows.length > {n}")
        page.run("document.querySelector('#pause').click()")
        times = [[int(part) for part in row[0].split(":")] for row in page.table("#hour-rows")]
        seconds = [3600 * hour + 60 * minute + second for hour, minute, second in times]
        check(all((later - before) % 86400 < 600 for later, before in zip(seconds, seconds[1:])), f"the newest first: {times}")


def test_answers_of_another_version():
    """What the page can't show is told, and asked for again."""
    with Indexer() as indexer:
        page = opened(indexer)
        page.run("""(() => { const ask = window.fetch; window.odd = true; window.fetch = async (path, options) => {
            const answer = await ask(path, options);
            if (!window.odd || path !== '/overview') return answer;
            const told = await answer.json();
            delete told.models;
            return new Response(JSON.stringify(told), {status: 200}); }; })()""")
        refresh(page)
        page.wait("document.querySelector('#notice').innerText.includes('Reload the page')")
        page.run("window.odd = false")
        refresh(page)
        page.wait("document.querySelector('#notice').hidden")


def test_restart():
    page = chromium()
    port = free_port()
    with Indexer("--history-interval", "200ms", port=port) as indexer:
        indexer.register(1, NOWHERE)
        wait_until(lambda: indexer.get("/history").json()["next"] > 1)
        page.open(indexer.url + "/")
        page.wait("document.querySelector('#workers-rows').rows.length === 1")
        page.wait("document.querySelector('#hour-note').innerText.startsWith('One sample')")
    refresh(page)
    page.wait("document.querySelector('#notice').innerText.includes(\"doesn't answer\")")
    equal(page.text("#updated"), "No answer")
    with Indexer("--history-interval", "200ms", port=port) as indexer:
        page.wait("document.querySelector('#notice').innerText.includes('was restarted at')")
        page.wait("document.querySelector('#workers-rows').rows.length === 0 && document.querySelector('#updated').innerText.startsWith('As of')")
        wait_until(lambda: indexer.get("/history").json()["next"] > 1)
        refresh(page)
        started = indexer.get("/overview").json()["started_ms"]
        if has_charts(indexer):
            page.click("#hour-table summary")
        page.wait("document.querySelector('#hour-rows').rows.length")
        check(page.run(f"document.querySelector('#hour-rows').rows.length <= 1 + (Date.now() - {started}) / 200"), "the old process's samples")


def test_ten_thousand_workers():
    wanted = 10000 // SLOW
    with Indexer("--max-registrations", str(wanted), "--max-connections", "64") as indexer:
        connection, n = indexer.connect(), 0
        for n in range(1, wanted + 1):
            body = {"instance_id": n, "model_name": f"m{n % 7}", "block_size": 16, "endpoint": NOWHERE}
            if indexer.post("/register", body, connection=connection).status != 201:
                n -= 1
                break
        check(n >= 1000, f"{n} registrations have room: too few file descriptors")
        page = opened(indexer)
        print(f"        {n} workers: shown after {page.run('performance.getEntriesByName(`shown`)[0].startTime'):.0f} ms")
        equal((tile(page, "Workers"), page.text("#range")), (f"{n:,}", f"1 to 50 of {n:,} workers"))
        equal(len(page.table("#workers-rows")), 50)
        check(page.run("document.querySelector('#before').disabled"), "no page before the first")
        page.click("#next")
        page.wait(f"document.querySelector('#range').innerText === '51 to 100 of {n:,} workers'")
        equal(page.table("#workers-rows")[0][0], "51")
        page.type("#search", str(n))
        page.wait("document.querySelector('#workers-rows').rows.length === 1")
        equal((page.table("#workers-rows")[0][0], page.text("#range")), (str(n), "1 to 1 of 1 workers"))
        check(page.run("document.querySelector('#next').disabled"), "no page behind the last")
        page.choose("#only", "active")
        page.wait("document.querySelector('#range').innerText === '0 to 0 of 0 workers'")
        page.choose("#explain-model", "m3")
        submit(page, " ".join(map(str, TOKENS)))
        equal(len(page.table("#explain-rows")), 100)
        page.click("#explain-more")
        page.wait("document.querySelector('#explain-rows').rows.length === 200")
        quiet(page, indexer)


def test_without_charts():
    with Indexer("--history-interval", "100ms") as indexer:
        wait_until(lambda: indexer.get("/history").json()["next"] > 1)
        page = chromium()
        page.command("Network.setBlockedURLs", urls=["*/ui/chart.js"])
        try:
            page.open(indexer.url + "/")
            page.wait("document.querySelector('#hour-note').innerText.includes('built without Chart.js')")
            page.wait("document.querySelector('#hour-rows').rows.length > 1")
        finally:
            page.command("Network.setBlockedURLs", urls=[])


# -- for everybody -----------------------------------------------------------------------------------------------------

def overflow(page):
    """Elements that make the page scroll sideways."""
    return page.run("document.documentElement.scrollWidth <= innerWidth ? [] : [...document.querySelectorAll('body *')]"
                    ".filter((e) => e.getBoundingClientRect().right > innerWidth && !e.closest('.scroll')).map((e) => e.outerHTML.slice(0, 120))")


def busy(indexer, *publishers):
    """Some workers with something to see."""
    for number, publisher in enumerate(publishers, 1):
        indexer.register(f"a-rather-long-name-of-a-pod-{number}", publisher)
        publisher.store(range(1, 3 + number), TOKENS[: 16 * (2 + number)])
    indexer.register("gone", NOWHERE)
    indexer.wait_score(TOKENS, "a-rather-long-name-of-a-pod-1", 48)


def test_widths_and_colours():
    with Indexer("--history-interval", "200ms") as indexer, Publisher() as one, Publisher() as two:
        busy(indexer, one, two)
        page = opened(indexer)
        submit(page, " ".join(map(str, TOKENS)))
        for width in (320, 390, 768, 1280, 2560):
            page.resize(width, 900)
            equal(overflow(page), [], f"at {width} pixels")
        grounds = set()
        for scheme in ("light", "dark"):
            page.scheme(scheme)
            worst = page.run(CONTRAST)
            check(worst[0] >= 4.5, f"{scheme}: contrast {worst}")
            grounds.add(page.run("getComputedStyle(document.body).backgroundColor"))
        equal(len(grounds), 2, "grounds of the two schemes")
        quiet(page, indexer)


# Of all text that is shown: the lowest contrast with its ground (WCAG 2), and where.
CONTRAST = """(() => {
  const parts = (c) => c.match(/[\\d.]+/g).map(Number);
  const light = (c) => { const [r, g, b] = parts(c).map((v) => { v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const ground = (e) => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor; const p = parts(c);
    if (p.length < 4 || p[3] > 0) return c; } return 'rgb(255, 255, 255)'; };
  let worst = [99, ''];
  for (const e of document.querySelectorAll('body *')) {
    const text = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!text || !e.checkVisibility() || e.disabled || e.closest('.skip')) continue;
    const a = light(getComputedStyle(e).color), b = light(ground(e)), ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < worst[0]) worst = [ratio, e.outerHTML.slice(0, 160)];
  }
  return worst;
})()"""

CONTROLS = {"button", "link", "textbox", "searchbox", "combobox", "checkbox", "DisclosureTriangle", "image", "img", "canvas", "region", "table"}


def by_keyboard(page):
    """The first stop skips to the contents; every control is reached, its focus can be seen, and the form is sent."""
    reached = []
    for _ in range(80):
        page.key("Tab")
        reached.append(page.run("(() => { const e = document.activeElement; return [e.id || e.getAttribute('href') || e.getAttribute('aria-label') ||"
                                "e.getAttribute('aria-labelledby') || e.tagName, getComputedStyle(e).outlineStyle]; })()"))
        if reached[-1][0] == "explain-text":
            break
    names = [name for name, _ in reached]
    equal(names[0], "#main", names)
    for name in ("pause", "search", "only", "workers-title", "explain-model", "explain-kind", "explain-lora", "explain-salt", "explain-text"):
        check(name in names, f"{name} isn't reached: {names}")
    equal([name for name, outline in reached if outline == "none"], [], "no focus is seen")
    page.command("Input.insertText", text=" ".join(map(str, TOKENS)))
    page.key("Tab")
    page.key("Enter")
    page.wait("document.querySelector('#explain-rows').rows.length === 2")


def test_accessible():
    with Indexer("--history-interval", "200ms") as indexer, Publisher() as one:
        busy(indexer, one)
        page = opened(indexer)
        by_keyboard(page)
        if has_charts(indexer):
            page.wait("document.querySelectorAll('#charts canvas').length === 8")
        nodes = page.accessible()
        unnamed = [(role, properties) for role, name, properties in nodes if role in CONTROLS - {"table"} and not name]
        equal(unnamed, [], "controls without a name")
        roles = {role for role, _, _ in nodes}
        check({"banner", "navigation", "main", "search", "status", "table", "columnheader", "rowheader", "heading", "button"} <= roles, roles)
        equal(page.run("[...document.querySelectorAll('table')].filter((t) => [...t.tHead.rows[0].cells].some((c) => c.scope !== 'col')).length"), 0)
        equal(page.run("[...document.querySelectorAll('[id]')].length - new Set([...document.querySelectorAll('[id]')].map((e) => e.id)).size"), 0)
        # A new turn leaves focus and rows where they are.
        page.run("window.row = document.querySelector('#workers-rows').rows[0], document.querySelector('#search').focus()")
        refresh(page)
        equal(page.run("[document.activeElement.id, window.row === document.querySelector('#workers-rows').rows[0]]"), ["search", True])
        quiet(page, indexer)


if __name__ == "__main__":
    if "--pictures" in sys.argv:
        import page_pictures
        page_pictures.make(pathlib.Path(SOURCE) / "docs" / "pictures")
        sys.exit()
    run(globals())
