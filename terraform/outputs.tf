output "bucket" {
  description = "Name of the bucket."
  value       = local.bucket
}

output "bucket_arn" {
  description = "ARN of the bucket."
  value       = local.bucket_arn
}

output "reader_policy_arn" {
  description = "Managed policy to attach to whoever may only read."
  value       = aws_iam_policy.access["reader"].arn
}

output "writer_policy_arn" {
  description = "Managed policy to attach to whoever runs s3kv: an instance profile, a task role, a user."
  value       = aws_iam_policy.access["writer"].arn
}

output "cleaner_policy_arn" {
  description = "Managed policy to attach to whoever runs s3kv with `bucket_bytes` or `bucket_idle_s`: a writer who may delete. Null unless `cleaner` is on."
  value       = one([for name, policy in aws_iam_policy.access : policy.arn if name == "cleaner"])
}

output "encryption_key_arn" {
  description = "ARN of the KMS key for data keys. Null unless `encryption_key` is on."
  value       = one(aws_kms_key.data_keys[*].arn)
}

output "encryption_key_alias" {
  description = "Name of the same key for `aws kms generate-data-key-without-plaintext --key-id`. Null unless `encryption_key` is on."
  value       = one(aws_kms_alias.data_keys[*].name)
}

output "data_keys_policy_arn" {
  description = "Managed policy to attach to whoever makes data keys, who cannot decrypt them. Null unless `encryption_key` is on."
  value       = one(aws_iam_policy.data_keys[*].arn)
}

output "role_arns" {
  description = "ARNs of the roles for EKS, by the names in `pod_identities` and `irsa`. IRSA wants them as the annotation `eks.amazonaws.com/role-arn` of the service account."
  value       = { for name, role in aws_iam_role.eks : name => role.arn }
}

output "kv_transfer_config" {
  description = "For a writer: the value of vLLM's `--kv-transfer-config`."
  value       = jsonencode(merge(local.kv_transfer_config, { kv_role = "kv_both", kv_connector_extra_config = local.writer_settings }))
}

output "reader_kv_transfer_config" {
  description = "For a reader: the same, but it never saves."
  value       = jsonencode(merge(local.kv_transfer_config, { kv_role = "kv_consumer" }))
}

output "ec_transfer_config" {
  description = "For a writer: the value of vLLM's `--ec-transfer-config`."
  value       = jsonencode(merge(local.ec_transfer_config, { ec_role = "ec_both", ec_connector_extra_config = local.writer_settings }))
}

output "reader_ec_transfer_config" {
  description = "For a reader: the same, but it never saves."
  value       = jsonencode(merge(local.ec_transfer_config, { ec_role = "ec_consumer" }))
}

locals {
  settings = {
    bucket = local.bucket_name
    prefix = var.prefix
    region = local.region
  }
  # What is used is written anew after a quarter of the days it has; not in a directory bucket.
  refresh_after_s = var.expiration_days * 86400 / 4
  writer_settings = merge(
    { for name, value in { refresh_after_s = local.refresh_after_s } : name => value if !local.express },
    var.settings,
    local.settings,
  )
  # Without what needs more than reading.
  reader_settings = {
    for name, value in merge(var.settings, local.settings) : name => value
    if !contains(["refresh_after_s", "bucket_bytes", "bucket_idle_s"], name)
  }
  kv_transfer_config = {
    kv_connector              = "S3KVConnector"
    kv_connector_module_path  = "s3kv.connectors"
    kv_connector_extra_config = local.reader_settings
  }
  ec_transfer_config = {
    ec_connector              = "S3ECConnector"
    ec_connector_module_path  = "s3kv.connectors"
    ec_connector_extra_config = local.reader_settings
  }
}
