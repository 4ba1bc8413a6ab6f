# Objects encrypted with a key of your own, so that whoever may not use the key cannot read them.

provider "aws" {
  region = "us-east-1"
}

# The default key policy leaves it to IAM who may use the key, and so to the module's policies.
resource "aws_kms_key" "kv_cache" {
  description             = "s3kv"
  enable_key_rotation     = true
  deletion_window_in_days = 7
}

module "kv_cache" {
  source = "../.."

  name        = "my-kv-cache"
  kms_key_arn = aws_kms_key.kv_cache.arn
}

output "writer_policy_arn" {
  value = module.kv_cache.writer_policy_arn
}

output "kv_transfer_config" {
  value = module.kv_cache.kv_transfer_config
}
