"""Address of a bucket: the URL, the signature and the proxy that botocore would use for it.

botocore's ruleset for endpoints decides, from our settings, its environment variables and its
files: partition, region, FIPS, dual-stack, acceleration, addressing, access points. We ask its
client for an object and stop it before it signs or sends the request, so that the address read here
is the one it would have used.
"""

from __future__ import annotations

import re
import ssl
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any
from urllib.parse import SplitResult, urlsplit

import botocore.exceptions
import botocore.session
from botocore.config import Config as BotocoreConfig
from botocore.httpsession import ProxyConfiguration, mask_proxy_url
from botocore.utils import get_environ_proxies

from s3kv.config import Config, masked
from s3kv.errors import ConfigError, StoreError

_KEY = "key"
_AWS_HOST = re.compile(r"\.amazonaws\.[a-z.]+\Z")
# An ARN, or https://docs.aws.amazon.com/AmazonS3/latest/userguide/bucketnamingrules.html. Names
# that AWS accepted before 2018 are refused as well: they have no virtual host.
_AWS_BUCKET = re.compile(
    r"arn:|(?!xn--|sthree-|\d+\.\d+\.\d+\.\d+\Z)[a-z0-9](?:[a-z0-9-]|\.(?!\.)){1,61}[a-z0-9]\Z"
)


@dataclass(frozen=True)
class Address:
    """Destination of requests for one bucket.

    url: of the bucket; a key follows it. region, service: those that requests are signed for; "*"
    if a signature is valid in all regions. scheme: botocore's name of the signature scheme:
    "v4", "v4-s3express" or "v4a". proxy_url: proxy that HTTPS_PROXY or HTTP_PROXY names for this
    URL, with its password; empty if there is none. ca_bundle: file of certificate authorities from
    our settings or botocore's; None if neither names one.
    """

    url: str
    region: str
    service: str
    scheme: str
    proxy_url: str
    ca_bundle: str | None

    @cached_property
    def parts(self) -> SplitResult:
        return urlsplit(self.url)

    @cached_property
    def authority(self) -> str:
        """The header `Host` of requests."""
        return authority_of(self.url)

    @cached_property
    def origin(self) -> str:
        """The URL without its path."""
        return f"{self.parts.scheme}://{self.authority}"

    @property
    def host(self) -> str:
        return (self.parts.hostname or "").rstrip(".")

    @property
    def proxy(self) -> str:
        """The proxy's URL without its password, for people to read."""
        return str(mask_proxy_url(self.proxy_url)) if self.proxy_url else ""


def authority_of(url: str) -> str:
    """The header `Host` of requests to a URL, normalised as front ends do it before they verify a
    signature: in lower case, without the scheme's default port and the name's trailing dot."""
    parts = urlsplit(url)
    host = (parts.hostname or "").partition("%")[0].rstrip(".")
    port = "" if parts.port in (None, 443 if parts.scheme == "https" else 80) else f":{parts.port}"
    return f"[{host}]{port}" if ":" in host else f"{host}{port}"


def zone_of(bucket: str) -> str | None:
    """The zone in the name of a directory bucket; None for any other bucket."""
    match = re.search(r"--([a-z0-9-]+)--x-s3$", bucket)
    return match[1] if match else None


def is_refreshable(bucket: str) -> bool:
    """Whether objects there are refreshed by a copy onto themselves: not in a directory bucket, and
    not behind a multi-region access point, which S3 takes as the destination of a copy only."""
    return zone_of(bucket) is None and not re.fullmatch(r"arn:.+\.mrap", bucket)


def find_address(config: Config) -> Address:
    """Ask botocore where the bucket is. Sends nothing and looks for no credentials.

    Raises `ConfigError` if AWS refuses the bucket's name or headers, if the endpoint holds a user,
    if its certificate authorities cannot be read, or if a package that the bucket needs is missing,
    and `StoreError` if botocore cannot use its settings or has no endpoint for them.
    """
    if config.put_headers and zone_of(config.bucket) is not None:
        told = f"put_headers is {config.put_headers!r}, and {config.bucket!r} is a directory bucket"
        raise ConfigError(f"{told}, with its own configuration: put_headers is not allowed")
    session = botocore.session.Session()
    try:
        client = session.create_client(
            "s3",
            region_name=config.region,
            endpoint_url=config.endpoint_url,
            aws_access_key_id="unused",  # else botocore searches files and networks for them
            aws_secret_access_key="unused",
            config=BotocoreConfig(s3=addressing(config)),
        )
        url, context = _first_request(client, config.bucket)
    except botocore.exceptions.MissingDependencyException as error:
        raise ConfigError(
            f"bucket is {config.bucket!r}: its requests are signed with Signature Version 4A, "
            "which needs a package that is not installed: pip install 'botocore[crt]'"
        ) from error
    except (botocore.exceptions.BotoCoreError, ValueError) as error:
        told = f"botocore's settings cannot be used: {masked(str(error))}"
        raise StoreError(told, code="botocore") from error
    if "@" in urlsplit(url).netloc:  # not from endpoint_url, which has been checked
        raise ConfigError(
            f"AWS_ENDPOINT_URL, AWS_ENDPOINT_URL_S3 or the profile names {masked(url)}: allowed is "
            "a URL without user and password (credentials are found as by every AWS tool)"
        )
    ca_bundle = config.ca_bundle or session.get_config_variable("ca_bundle")
    try:
        if ca_bundle and url.startswith("https:"):
            ssl.create_default_context(cafile=ca_bundle)
    except OSError as error:
        told = f"ca_bundle, AWS_CA_BUNDLE or the profile names {ca_bundle!r} ({error}): allowed is "
        raise ConfigError(f"{told}a file of certificates in the PEM form") from error
    signing = context.get("signing", {})
    if _AWS_HOST.search(urlsplit(url).hostname or "") and not _AWS_BUCKET.match(config.bucket):
        raise ConfigError(
            f"bucket is {config.bucket!r}, a name that AWS refuses: allowed are 3 to 63 lower-case "
            "letters, digits, hyphens and single dots, with a letter or digit at both ends; for "
            "another server set endpoint_url"
        )
    return Address(
        url=url.removesuffix(_KEY),
        region=signing.get("region") or client.meta.region_name,
        service=signing.get("signing_name") or "s3",
        scheme=context["auth_type"],
        proxy_url=ProxyConfiguration(get_environ_proxies(url)).proxy_url_for(url) or "",
        ca_bundle=ca_bundle,
    )


def addressing(config: Config) -> Any:
    """botocore's settings for S3, from ours. "auto" leaves the style to botocore and its files:
    virtual-hosted style on AWS if its certificates allow that, path style elsewhere."""
    style = config.addressing_style
    return {} if style == "auto" else {"addressing_style": style}


def _first_request(client: Any, bucket: str) -> tuple[str, dict[str, Any]]:
    """The URL and the context of a GET that is answered before it is signed."""
    found: list[tuple[str, dict[str, Any]]] = []

    def answer(params: dict[str, Any], context: dict[str, Any], **_: Any) -> tuple[Any, Any]:
        found.append((params["url"], context))
        return SimpleNamespace(status_code=200), {}

    client.meta.events.register("before-call.s3.GetObject", answer)
    with closing(client):
        client.get_object(Bucket=bucket, Key=_KEY)
    return found[0]
