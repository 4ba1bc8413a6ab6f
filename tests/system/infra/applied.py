"""The module applied to a simulated AWS (moto), and the people who use what it made.

What the simulation cannot do, and what is done about it:
- It does not evaluate conditions in policies, so the bucket policy's denials hold for everybody;
  tests take it away before the bucket is used.
- Outside S3 it grants actions only on all resources: policies on keys of KMS are only planned.
- It has no associations of Pod Identity: those are left out, and only planned.
- It takes the removal of request metrics for that of the bucket: `destroyable` leaves them out.
- The provider waits 55 seconds for lifecycle rules to settle, on AWS as well: `destroyable`, which
  is for a nightly test, does so, the others leave the rules out.
- It does not carry directory buckets far enough: those are only planned.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.s3 import REGION, S3Server, moto_process
from tests.servers import boto_client
from tests.system.infra.terraform import Result, Terraform, copy_module

ACCOUNT = "123456789012"
"""The account moto is."""
ISSUER = "oidc.eks.us-east-1.amazonaws.com/id/ABC"
CLUSTER = "gpu"
NAME = "cache"
PREFIX = "team/s3kv"

PROVIDER = """
provider "aws" {{
  region                      = "{region}"
  access_key                  = "testing"
  secret_key                  = "testing-secret"
  s3_use_path_style           = true
  skip_credentials_validation = true
  skip_metadata_api_check     = true
  skip_requesting_account_id  = true

  endpoints {{
    cloudwatch = "{url}"
    ec2        = "{url}"
    eks        = "{url}"
    iam        = "{url}"
    kms        = "{url}"
    s3         = "{url}"
    s3control  = "{url}"
    sts        = "{url}"
  }}
}}
"""
"""The provider of a simulated account."""

ROOT = """
module "kv_cache" {{
  source = "./module"

  name   = "{name}"
  prefix = "{prefix}"
  cleaner = true
  encryption_key = true
  tags   = {{ Team = "inference" }}

  pod_identities = {{
    engine = {{ cluster_name = "{cluster}", namespace = "inference", service_account = "engine" }}
  }}
  irsa = {{
    irsa-writer = {{ oidc_provider_arn = "{oidc}", namespace = "inference", service_account = "w" }}
  }}
  gateway_endpoint = {{ vpc_id = "{vpc}", route_table_ids = ["{route_table}"] }}
  max_bucket_gib   = 100
}}

output "all" {{
  value = module.kv_cache
}}
"""


def _without(kind: str, none: str = "count = 0") -> str:
    return f'resource "{kind}" "this" {{\n  {none}\n}}\n'


WITHOUT_ASSOCIATIONS = _without("aws_eks_pod_identity_association", "for_each = {}")
WITHOUT_METRICS = _without("aws_s3_bucket_metric")
WITHOUT_LIFECYCLE = _without("aws_s3_bucket_lifecycle_configuration")


@dataclass(frozen=True, slots=True)
class Applied:
    terraform: Terraform
    directory: Path
    server: S3Server
    outputs: dict[str, Any]

    def command(self, *arguments: str) -> Result:
        return self.terraform.run(self.directory, *arguments, "-no-color")

    def aws(self, service: str, keys: dict[str, str] | None = None) -> Any:
        """A boto3 client of the account's administrator, or of a user with these keys."""
        return aws(self.server, service, keys)

    def user(self, policy_arn: str) -> dict[str, str]:
        """The keys, as environment variables, of a new user who has this policy and no other."""
        iam = self.aws("iam")
        name = f"user-{len(iam.list_users()['Users'])}"
        iam.create_user(UserName=name)
        iam.attach_user_policy(UserName=name, PolicyArn=policy_arn)
        key = iam.create_access_key(UserName=name)["AccessKey"]
        return {
            "AWS_ACCESS_KEY_ID": key["AccessKeyId"],
            "AWS_SECRET_ACCESS_KEY": key["SecretAccessKey"],
        }

    @contextmanager
    def policies_enforced(self) -> Iterator[None]:
        """Until the block ends, everybody may do only what policies allow."""
        self._enforce_after("0")
        try:
            yield
        finally:
            self._enforce_after("inf")

    def _enforce_after(self, requests: str) -> None:
        request = urllib.request.Request(
            f"{self.server.url}/moto-api/reset-auth",
            data=requests.encode(),
            headers={"Content-Type": "text/plain"},
            method="POST",
        )
        urllib.request.urlopen(request, timeout=10).close()


def aws(server: S3Server, service: str, keys: dict[str, str] | None = None) -> Any:
    return boto_client(server.url, keys or server.env, service)


@contextmanager
def applied(
    terraform: Terraform, directory: Path, *, destroyable: bool = False
) -> Iterator[Applied]:
    """Apply the module with everything it can make to a fresh, simulated account."""
    module = copy_module(directory / "module")
    (module / "associations_override.tf").write_text(WITHOUT_ASSOCIATIONS)
    left_out = WITHOUT_METRICS if destroyable else WITHOUT_LIFECYCLE
    (module / "left_out_override.tf").write_text(left_out)
    with moto_process() as server:
        (directory / "main.tf").write_text(_root(server))
        terraform.init(directory)
        done = terraform.run(directory, "apply", "-auto-approve", "-input=false", "-no-color")
        assert done.code == 0, done.output
        told = terraform.run(directory, "output", "-json", "all")
        assert told.code == 0, told.output
        yield Applied(terraform, directory, server, json.loads(told.output))


def _root(server: S3Server) -> str:
    """A configuration around the module, and in the account what the module only refers to."""
    ec2 = aws(server, "ec2")
    vpc = ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
    route_table = ec2.create_route_table(VpcId=vpc)["RouteTable"]["RouteTableId"]
    aws(server, "eks").create_cluster(
        name=CLUSTER,
        roleArn=f"arn:aws:iam::{ACCOUNT}:role/cluster",
        resourcesVpcConfig={"subnetIds": []},
    )
    oidc = aws(server, "iam").create_open_id_connect_provider(Url=f"https://{ISSUER}")
    return PROVIDER.format(region=REGION, url=server.url) + ROOT.format(
        name=NAME,
        prefix=PREFIX,
        cluster=CLUSTER,
        oidc=oidc["OpenIDConnectProviderArn"],
        vpc=vpc,
        route_table=route_table,
    )
