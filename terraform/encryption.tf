# A key for the keys of s3kv's own encryption (docs/encryption.md). Engines hold data keys that this
# key has encrypted, and have them decrypted at start. Whoever makes data keys cannot decrypt them,
# and engines cannot make any. The key's own policy is KMS's default: it leaves the rest to IAM.

locals {
  # Beside the resource: a document that names the resource itself is not shown by any plan that
  # creates it.
  data_keys_arns = aws_kms_key.data_keys[*].arn
}

resource "aws_kms_key" "data_keys" {
  count = var.encryption_key ? 1 : 0

  description             = "s3kv: data keys of ${local.bucket_name}"
  enable_key_rotation     = true # data keys made before a rotation still decrypt
  deletion_window_in_days = 30   # without it, engines do not start
  tags                    = local.tags
}

resource "aws_kms_alias" "data_keys" {
  count = var.encryption_key ? 1 : 0

  name          = "alias/${local.bucket_name}"
  target_key_id = aws_kms_key.data_keys[0].key_id
}

data "aws_iam_policy_document" "data_keys" {
  count = var.encryption_key ? 1 : 0

  statement {
    sid       = "MakeDataKeys"
    actions   = ["kms:GenerateDataKeyWithoutPlaintext"]
    resources = local.data_keys_arns
  }
}

resource "aws_iam_policy" "data_keys" {
  count = var.encryption_key ? 1 : 0

  name        = "${local.bucket_name}-data-keys"
  description = "Make data keys for s3kv's encryption in ${local.bucket_name}"
  policy      = data.aws_iam_policy_document.data_keys[0].json
  tags        = local.tags
}
