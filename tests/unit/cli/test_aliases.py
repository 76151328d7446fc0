"""Flags of other servers: taken where they mean the same."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nibble.cli.main import app
from nibble.cli.peer_drafts import FLAGS
from nibble.cli.peer_flags import ANSWERS, DEQUANTISED, translate
from nibble.cli.serve import FLAG_ALIASES, VALUE_ALIASES, translate_flags
from nibble.config import Config
from nibble.server.chat_format import CALL_FORMATS, REASONING_FORMATS
from nibble.server.settings import Settings


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("demo --kv-cache-dtype fp8", "demo --kv-format fp8"),
        ("demo --kv-cache-dtype=nvfp4 --max-model-len 4096", "demo --kv-format=nvfp4 --max-context 4096"),
        ("--model-path demo --disable-radix-cache --port 1", "demo --no-prefix-cache --port 1"),
        ("--model=demo --enforce-eager --dtype half", "demo --no-compile --no-graphs --dtype float16"),
        ("demo --kv-format auto --dtype float", "demo --kv-format auto --dtype float32"),
        ("demo --kv-format nvfp4", "demo --kv-format nvfp4"),
        ("demo --data-parallel-size 4", "demo --replicas 4"),
        ("demo --dp=4 -dp 2", "demo --replicas=4 --replicas 2"),
        ("demo --enable-auto-tool-choice=true --port 1", "demo --port 1"),
    ],
)
def test_translated(said: str, meant: str) -> None:
    assert translate_flags(said.split()) == meant.split()


def test_every_flag_stands_for_one_that_is_there() -> None:
    known = {
        f"--{prefix}{field.name.replace('_', '-')}"
        for field in (*fields(Config), *fields(Settings))
        for prefix in ("", "no-")
    }
    assert {word for flag in FLAG_ALIASES.values() for word in flag.split()} <= known


def test_every_flag_is_told_of() -> None:
    page = (Path(__file__).parents[3] / "docs/migrating.md").read_text()
    assert [flag for flag in FLAG_ALIASES if f"`{flag}`" not in page and f"`{flag} " not in page] == []


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("m -pp 1 --pipeline-parallel-size=1 --port 1", "m --port 1"),
        ("m --prefill-kv-cache-dequant-dtype auto", "m"),
        ("m --enable-hisparse --kv-format bf16", "m --kv-format bf16 --hisparse on"),
        ('m --kv-events-config {"enable_kv_cache_events":true}', "m --kv-events tcp://*:5557"),
        (
            'm --kv-events-config={"publisher":"zmq","topic":"kv"}',
            "m --kv-events tcp://*:5557 --kv-events-topic kv",
        ),
        (
            'm --kv-events-config {"enable_kv_cache_events":true,"endpoint":"tcp://*:1","replay_endpoint":"tcp://*:2"}',
            "m --kv-events tcp://*:1 --kv-events-replay tcp://*:2",
        ),
        ('m --kv-events-config {"enable_kv_cache_events":false,"endpoint":"tcp://*:1"}', "m"),
        ('m --kv-events-config {"enable_kv_cache_events":true,"publisher":"null"}', "m"),
        (
            'm --enable-hisparse --hisparse-config {"top_k":2048,"device_buffer_size":4096}',
            "m --hisparse buffer=4096 --index-topk 2048",
        ),
        (
            "m --speculative-algorithm NGRAM --speculative-num-draft-tokens 8",
            "m --speculative lookup --speculative-tokens 7",
        ),
        (
            "m --speculative-algorithm=STANDALONE --speculative-draft-model-path d --speculative-num-steps 3 --port 1",
            "m --port 1 --speculative draft:d --speculative-tokens 3",
        ),
        (
            'm --speculative-config {"method":"ngram","num_speculative_tokens":5}',
            "m --speculative lookup --speculative-tokens 5",
        ),
        ('m --speculative-config {"model":"d"}', "m --speculative draft:d"),
        ("m --speculative-algorithm NEXTN", "m --speculative mtp"),
        (
            'm --speculative-config {"method":"eagle3","model":"d","num_speculative_tokens":3}',
            "m --speculative eagle3:d --speculative-tokens 3",
        ),
        ('m --hisparse-config={"device_buffer_size":4096} --port 1', "m --port 1 --hisparse buffer=4096"),
    ],
)
def test_flags_in_other_words(words: str, meant: str) -> None:
    assert translate(words.split()) == meant.split()


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (
            "m --pipeline-parallel-size 8",
            "pipeline parallelism is not served: GPUs of a host share each layer",
        ),
        ("m --ep=2", "--ep 2: experts are divided among the GPUs of --tp by --expert-parallel"),
        (
            "m --kv-events-config tcp://*:1",
            '--kv-events-config must be a JSON object, as \'{"enable_kv_cache_events"',
        ),
        (
            'm --kv-events-config {"hwm":5}',
            "--kv-events-config hwm: there is no such setting here, leave it out",
        ),
        ('m --kv-events-config {"publisher":"nats"}', "publisher is zmq or null, not 'nats'"),
        ("m --prefill-kv-cache-dequant-dtype fp8_e4m3", "choose by --prefill-backend"),
        ('m --hisparse-config {"host_to_device_ratio":5}', "host_memory=64GiB"),
        ('m --hisparse-config {"page":5}', "there is no such setting here"),
        ("m --hisparse-config [1]", "must be a JSON object"),
        ("m --hisparse-config", "must be a JSON object"),
        ("m --calculate-kv-scales", "--kv-scales calibrate"),
        ("m --speculative-algorithm EAGLE", "heads that draft"),
        ('m --speculative-config {"method":"eagle3"}', "names no model"),
        ("m --speculative-config ngram", "must be a JSON object"),
        ("m --speculative-num-steps 3", "needs --speculative-algorithm"),
        ("m --speculative-algorithm NGRAM --speculative-eagle-topk 4", "drafts are chains"),
        ("m --speculative-algorithm STANDALONE", "names no model"),
        ("m --enable-lora", "LoRA is not served"),
        ("m --kv-cache-dtype int8", "KV format 'int8' is not served: .*--kv-format fp8_e4m3"),
    ],
)
@pytest.mark.parametrize("command", ["plan", "serve"])
def test_flags_without_a_counterpart_are_answered(command: str, words: str, answer: str) -> None:
    result = CliRunner().invoke(app, [command, *words.replace("m ", "demo ", 1).split()])
    assert result.exit_code == 2
    assert re.search(answer, " ".join(re.sub("[│╭╮╰╯─]", " ", result.stderr).split()))


def test_every_answer_is_on_the_page() -> None:
    page = (Path(__file__).parents[3] / "docs/migrating.md").read_text()
    assert [
        flag for flag in (*ANSWERS, *FLAGS, DEQUANTISED, "--pipeline-parallel-size") if f"`{flag}" not in page
    ] == []


def test_every_format_stands_for_one_that_is_there() -> None:
    assert set(VALUE_ALIASES["--tool-format"].values()) <= set(CALL_FORMATS)
    assert set(VALUE_ALIASES["--reasoning-parser"].values()) <= set(REASONING_FORMATS)
    assert translate_flags(["m", "--tool-call-parser", "qwen25", "--enable-auto-tool-choice"]) == [
        "m",
        "--tool-format",
        "hermes",
    ]
    assert translate_flags(["--tool-call-parser=deepseekv3", "--reasoning-parser=deepseek-r1"]) == [
        "--tool-format=deepseek_v3", "--reasoning-parser=deepseek_r1",
    ]  # fmt: skip
