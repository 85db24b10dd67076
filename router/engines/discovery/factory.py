"""The source of replicas that the settings name."""

from __future__ import annotations

from router.config.schema import DiscoverySettings, SettingsError
from router.engines.discovery import Discovery
from router.engines.discovery.dns import DnsDiscovery


def source_of(s: DiscoverySettings, *, split: bool = False) -> Discovery | None:
    """Return the discovery for replicas that are not in the settings; None without one. `split`: replicas have roles.
    Raises SettingsError."""
    if s.source == DnsDiscovery.source:
        return DnsDiscovery(
            s.dns_name, port=int(s.port), scheme=s.scheme, interval_s=s.dns_interval_s, loopback=s.loopback
        )
    if s.source == "kubernetes":
        from router.engines.discovery.kubernetes import KubernetesDiscovery  # needs an extra, and takes 0.2 s

        try:
            return KubernetesDiscovery(s, split=split)
        except ValueError as error:  # an invalid kubeconfig, or no kubeconfig outside of a pod
            raise SettingsError([str(error)]) from error
    return None
