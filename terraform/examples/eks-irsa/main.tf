# For clusters with an OIDC provider and without Pod Identity. Annotate the service account:
#   eks.amazonaws.com/role-arn: (terraform output -raw role_arn)

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
