"""Breaks of tenants, shared processors, TLS and Ray; see `scripts.mutants_table`."""

from __future__ import annotations

from scripts.mutant import Mutant
from scripts.mutant import rows_of as _rows

BEYOND: tuple[Mutant, ...] = (
    *_rows(
        "serving/decisions/fair.py",
        "serving/test_fair.py",
        ("line.tag += entry.facts.cost", "line.tag += 1", "shares are of work, not of items"),
        ("            line.tag = self._now\n", "            pass\n", "who stays away saves nothing up"),
        ("self._now = max(self._now, line.tag)", "pass", "virtual time goes on"),
        ("(tag + line.waiting[place].facts.cost, after", "(tag, after", "what policies see is the order of service"),
        ("kept if len(kept) <= 2 * len(waiting) + FEW else waiting", "kept", "names without end are forgotten"),
        (
            "if self._only is None:\n            self._lines.clear()",
            "if False:\n            pass",
            "at rest nobody owes",
        ),
    ),
    *_rows(
        "serving/decisions/queue.py",
        "serving/test_fair.py",
        ("own + count > min(share, self.most_per_tenant or share)", "False", "who has its share makes nobody go"),
        ("if not entry.patient][:lacking]", "][:lacking]", "who would wait for room is not put out"),
        ("self.most_per_tenant - self.waiting_of(tenant))", "self.most)", "a tenant has a bound of its own"),
    ),
    *_rows(
        "serving/decisions/tenants.py",
        "serving/test_fair.py",
        ("self._rows.popitem(last=False)", "pass", "so many tenants are remembered"),
        ("self._rows.move_to_end(tenant)", "pass", "the one not heard of for longest is forgotten"),
    ),
    *_rows(
        "serving/engine/gate.py",
        "serving/test_gate.py",
        ("if over >= 0:", "if False:", "no more batches than slots"),
        ("entered + self._patience - now", "entered + 1e9 - now", "who hangs no longer counts"),
        ("if self._line[0] is ticket else self._patience", "", "first come, first served"),
        ('if getattr(engine, "on_cpu", False)]', "]", "other devices do not wait for the CPU"),
    ),
    *_rows(
        "serving/engine/service.py",
        "serving/test_gate.py",
        ("            _left(batch.ticket)\n", "", "a turn ends with its batch"),
        ("decision.launch and ticket is None and self.gate is not None", "False", "engines that share take turns"),
    ),
    *_rows(
        "serving/engine/service.py",
        "serving/test_tenants.py",
        ("return [entry.reply for entry in gone if entry.settle(error)]", "return []", "who is put out is told"),
        ("entry.patient = patient", "pass", "what map has put in stays"),
    ),
    *_rows(
        "web/tls.py",
        "web/test_tls.py",
        ("context.load_cert_chain(certificate, private_key, password=_no_password)", "pass", "key and certificate fit"),
    ),
    *_rows(
        "web/tenants.py",
        "web/test_tenants.py",
        ("if key_name or not header:", "if not header:", "a header does not change whose key it is"),
        ("if len(name) > LONGEST or not", "if not", "names have an end"),
    ),
    *_rows(
        "web/ray_metrics.py",
        "web/test_ray_settings.py",
        ("return value - before if value >= before else value", "return value", "a counter counts once"),
    ),
)
