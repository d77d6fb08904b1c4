"""What we ask of the manifests beyond their schema. Each check takes Manifests and yields one line for each fault."""

from collections.abc import Callable

from k8s.checks.network import check_paths
from k8s.checks.pods import (
    check_images,
    check_isolation,
    check_probes,
    check_resources,
    check_security,
)
from k8s.checks.settings import check_kv_memory, check_rollout, check_setting_names, check_shutdown
from k8s.checks.tls import check_certificates, check_encryption
from k8s.checks.wiring import check_names, check_references, check_selectors, check_services
from k8s.manifests import Manifests, Problems

ALL_CHECKS: tuple[Callable[[Manifests], Problems], ...] = (
    check_names,
    check_selectors,
    check_services,
    check_references,
    check_isolation,
    check_security,
    check_probes,
    check_resources,
    check_images,
    check_setting_names,
    check_kv_memory,
    check_shutdown,
    check_rollout,
    check_encryption,
    check_certificates,
    check_paths,
)
