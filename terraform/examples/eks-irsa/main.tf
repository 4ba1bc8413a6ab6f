# For clusters with an OIDC provider and without Pod Identity. The service account is annotated with the
# role: deploy/README.md has the two commands.

provider "aws" {
  region = "us-east-1"
}

module "kv_cache" {
  source = "../.."

  name = "my-kv-cache"

  irsa = {
    engine = {
      oidc_provider_arn = var.oidc_provider_arn
      namespace         = "inference"
      service_account   = "engine"
    }
  }

  # As deploy/kubernetes is laid out for: its memory limits hold host_bytes, and a shutdown waits.
  settings = {
    host_bytes      = "32GiB"
    on_unavailable  = "serve"
    drain_timeout_s = 10
  }
}

variable "oidc_provider_arn" {
  description = "ARN of the cluster's IAM OIDC provider."
  type        = string
}

output "role_arn" {
  value = module.kv_cache.role_arns["engine"]
}

output "kv_transfer_config" {
  value = module.kv_cache.kv_transfer_config
}
