"""`--structured`: which requests follow the schema, and that it cannot end too early."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import msgspec
import pytest
from llguidance import LLMatcher
from support.http_server import HTTPServer
from support.toy_tokenizers import byte_level

from minisgl.bench import run, run_latency
from minisgl.bench.config import BenchConfig, LatencyConfig, ReportConfig, Sizes, Span
from minisgl.bench.online.target import Endpoint
from minisgl.bench.workload.config import WorkloadConfig
from minisgl.bench.workload.requests import make_workload
from minisgl.bench.workload.schedule import ScheduledRequest, make_schedule
from minisgl.bench.workload.structured import (
    RESPONSE_FORMAT,
    SCHEMA,
    STRUCTURED,
    is_structured,
)
from minisgl.config import EngineConfig
from minisgl.errors import ConfigError
